/* The patch kernel for one element type. Included by patches.c once for each, with REAL
   and NAME() defined; so no include guard, and no Python. */

/* Add each patch of `patches` onto the pixels of `image` that it was taken from; what
   belongs to padding is skipped. One image element gets its addends in the order of
   the patches, as in brainstorm's own loops. */
static void
NAME(add_patches)(const struct layout *l, const REAL *restrict patches,
                  REAL *restrict image)
{
    for (ptrdiff_t row = 0; row < l->rows; row++) {
        for (ptrdiff_t column = 0; column < l->columns; column++) {
            struct patch p = patch_at(l, row, column);
            for (ptrdiff_t y = p.top; y < p.top + l->kernel_h; y++) {
                if (y >= 0 && y < l->height) {
                    REAL *to = image + (y * l->width + p.left + p.lead) * l->channels;
                    const REAL *from = patches + p.lead * l->channels;
                    ptrdiff_t count = p.inside * l->channels;
                    for (ptrdiff_t i = 0; i < count; i++) {
                        to[i] += from[i];
                    }
                }
                patches += l->kernel_w * l->channels;
            }
        }
    }
}
