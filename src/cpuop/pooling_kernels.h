/* The pooling kernels for one element type. Included by pooling.c once for each, with
   REAL, INTEGER (as wide), LOWEST and NAME() defined; so no include guard, no Python.

   Every kernel walks images, then output rows; a row is done for a block of channels
   at a time. Neighbouring channels lie side by side in memory, so a block is worked on
   with vectors. For any one channel the values still meet in the order of brainstorm's
   own loops (window rows, then columns), which is what makes sums and ties come out
   the same to the bit. The `count` of channels in a block is a constant wherever these
   functions are inlined. */

#define LANES ((int)(16 / sizeof(REAL)))
typedef REAL NAME(vector) __attribute__((vector_size(16)));
typedef INTEGER NAME(mask) __attribute__((vector_size(16)));

/* Maximum of `count` vectors of channels, the first of them `channel`, for one row of
   windows. `input` is the image's first pixel, output and argmax the row's. NaN is
   never greater than anything, and an equal value does not replace an earlier one. */
static inline ALWAYS_INLINE void
NAME(max_row)(const struct geometry *g, ptrdiff_t y, ptrdiff_t channel, const int count,
              const REAL *restrict input, REAL *restrict output, REAL *restrict argmax)
{
    for (ptrdiff_t x = 0; x < g->out_w; x++) {
        struct window w = window_at(g, y, x);
        NAME(vector) best[MOST_VECTORS];
        NAME(mask) where[MOST_VECTORS]; /* a pixel's number in the image, or -1 */
        for (int k = 0; k < count; k++) {
            best[k] = LOWEST - (NAME(vector)){0};
            where[k] = -1 - (NAME(mask)){0};
        }
        for (ptrdiff_t in_y = w.top; in_y < w.bottom; in_y++) {
            ptrdiff_t number = in_y * g->in_w + w.left;
            const REAL *pixel = input + number * g->channels + channel;
            for (ptrdiff_t in_x = w.left; in_x < w.right; in_x++) {
                for (int k = 0; k < count; k++) {
                    NAME(vector) value;
                    memcpy(&value, pixel + k * LANES, sizeof value);
                    NAME(mask) greater = value > best[k];
                    best[k] = (NAME(vector))((greater & (NAME(mask))value) |
                                             (~greater & (NAME(mask))best[k]));
                    where[k] = (greater & (INTEGER)number) | (~greater & where[k]);
                }
                pixel += g->channels;
                number++;
            }
        }
        for (int k = 0; k < count; k++) {
            for (int lane = 0; lane < LANES; lane++) {
                ptrdiff_t c = channel + k * LANES + lane;
                INTEGER number = where[k][lane];
                /* Counted exactly, then rounded once where REAL cannot hold it. */
                INTEGER index = number * (INTEGER)g->channels + (INTEGER)c;
                output[c] = number < 0 ? 0 : best[k][lane];
                argmax[c] = (REAL)(number < 0 ? -1 : index);
            }
        }
        output += g->channels;
        argmax += g->channels;
    }
}

/* The same for one channel. */
static inline void
NAME(max_row_of_one)(const struct geometry *g, ptrdiff_t y, ptrdiff_t channel,
                     const REAL *restrict input, REAL *restrict output,
                     REAL *restrict argmax)
{
    for (ptrdiff_t x = 0; x < g->out_w; x++) {
        struct window w = window_at(g, y, x);
        REAL best = LOWEST;
        const REAL *found = NULL;
        for (ptrdiff_t in_y = w.top; in_y < w.bottom; in_y++) {
            const REAL *row = input + in_y * g->in_w * g->channels + channel;
            const REAL *end = row + w.right * g->channels;
            for (const REAL *value = row + w.left * g->channels; value < end;
                 value += g->channels) {
                if (*value > best) {
                    best = *value;
                    found = value;
                }
            }
        }
        output[channel] = found == NULL ? 0 : best;
        argmax[channel] = (REAL)(found == NULL ? -1 : found - input);
        output += g->channels;
        argmax += g->channels;
    }
}

static void
NAME(maxpool_forward)(const struct geometry *g, const REAL *restrict inputs,
                      REAL *restrict outputs, REAL *restrict argmax)
{
    for (ptrdiff_t image = 0; image < g->images; image++) {
        for (ptrdiff_t y = 0; y < g->out_h; y++) {
            ptrdiff_t c = 0;
            for (; c + 2 * LANES <= g->channels; c += 2 * LANES) {
                NAME(max_row)(g, y, c, 2, inputs, outputs, argmax);
            }
            for (; c + LANES <= g->channels; c += LANES) {
                NAME(max_row)(g, y, c, 1, inputs, outputs, argmax);
            }
            for (; c < g->channels; c++) {
                NAME(max_row_of_one)(g, y, c, inputs, outputs, argmax);
            }
            outputs += g->out_w * g->channels;
            argmax += g->out_w * g->channels;
        }
        inputs += image_size(g);
    }
}

/* Find the first index in argmax that lies beyond the image; -1 if all are inside.
   Negative ones and NaN mean "no maximum" and are fine. Compared as doubles, which hold
   every image size exactly. */
static ptrdiff_t
NAME(find_outside)(const struct geometry *g, const REAL *argmax)
{
    ptrdiff_t size = g->images * g->out_h * g->out_w * g->channels;
    double limit = (double)image_size(g);
    int outside = 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        outside |= (double)argmax[i] >= limit;
    }
    for (ptrdiff_t i = 0; outside && i < size; i++) {
        if ((double)argmax[i] >= limit) {
            return i;
        }
    }
    return -1;
}

static void
NAME(maxpool_backward)(const struct geometry *g, const REAL *restrict argmax,
                       REAL *restrict in_deltas, const REAL *restrict out_deltas)
{
    double limit = (double)image_size(g);
    uint32_t channels = (uint32_t)g->channels;
    for (ptrdiff_t image = 0; image < g->images; image++) {
        for (ptrdiff_t pixel = 0; pixel < g->out_h * g->out_w; pixel++) {
            for (uint32_t c = 0; c < channels; c++) {
                /* find_outside has refused what lies outside; asking again costs next
                   to nothing, and keeps memory whole if a thread changes argmax. */
                double position = argmax[c];
                if (position > -1 && position < limit) {
                    uint32_t index = (uint32_t)position;
                    /* Only the pixel is taken from the index, not the channel: where
                       float32 has rounded the index (from 2**24 on), they disagree. */
                    in_deltas[index / channels * channels + c] += out_deltas[c];
                }
            }
            argmax += channels;
            out_deltas += channels;
        }
        in_deltas += image_size(g);
    }
}

/* Mean of `count` channels for one row of windows: the sum, divided by the number of
   pixels that are not padding. `input` is the block's first channel in the image's
   first pixel, output the same in the row's. */
static inline ALWAYS_INLINE void
NAME(mean_row)(const struct geometry *g, ptrdiff_t y, const int count,
               const REAL *restrict input, REAL *restrict output)
{
    for (ptrdiff_t x = 0; x < g->out_w; x++) {
        struct window w = window_at(g, y, x);
        REAL sum[MOST_CHANNELS];
        for (int k = 0; k < count; k++) {
            sum[k] = 0;
        }
        for (ptrdiff_t in_y = w.top; in_y < w.bottom; in_y++) {
            const REAL *row = input + in_y * g->in_w * g->channels;
            const REAL *end = row + w.right * g->channels;
            for (const REAL *pixel = row + w.left * g->channels; pixel < end;
                 pixel += g->channels) {
                for (int k = 0; k < count; k++) {
                    sum[k] += pixel[k];
                }
            }
        }
        REAL pixels = (REAL)window_pixels(w);
        for (int k = 0; k < count; k++) {
            output[k] = sum[k] / pixels;
        }
        output += g->channels;
    }
}

static void
NAME(avgpool_forward)(const struct geometry *g, const REAL *restrict inputs,
                      REAL *restrict outputs)
{
    for (ptrdiff_t image = 0; image < g->images; image++) {
        for (ptrdiff_t y = 0; y < g->out_h; y++) {
            ptrdiff_t c = 0;
            for (; c + 16 <= g->channels; c += 16) {
                NAME(mean_row)(g, y, 16, inputs + c, outputs + c);
            }
            for (; c + 8 <= g->channels; c += 8) {
                NAME(mean_row)(g, y, 8, inputs + c, outputs + c);
            }
            for (; c + 4 <= g->channels; c += 4) {
                NAME(mean_row)(g, y, 4, inputs + c, outputs + c);
            }
            for (; c < g->channels; c++) {
                NAME(mean_row)(g, y, 1, inputs + c, outputs + c);
            }
            outputs += g->out_w * g->channels;
        }
        inputs += image_size(g);
    }
}

/* For one row of windows, add to each pixel its share of `count` channels of the
   output's delta. The pointers are those of mean_row. */
static inline ALWAYS_INLINE void
NAME(share_row)(const struct geometry *g, ptrdiff_t y, const int count,
                REAL *restrict in_delta, const REAL *restrict out_delta)
{
    for (ptrdiff_t x = 0; x < g->out_w; x++) {
        struct window w = window_at(g, y, x);
        REAL share[MOST_CHANNELS];
        REAL pixels = (REAL)window_pixels(w);
        for (int k = 0; k < count; k++) {
            share[k] = out_delta[k] / pixels;
        }
        for (ptrdiff_t in_y = w.top; in_y < w.bottom; in_y++) {
            REAL *row = in_delta + in_y * g->in_w * g->channels;
            REAL *end = row + w.right * g->channels;
            for (REAL *pixel = row + w.left * g->channels; pixel < end;
                 pixel += g->channels) {
                for (int k = 0; k < count; k++) {
                    pixel[k] += share[k];
                }
            }
        }
        out_delta += g->channels;
    }
}

static void
NAME(avgpool_backward)(const struct geometry *g, REAL *restrict in_deltas,
                       const REAL *restrict out_deltas)
{
    for (ptrdiff_t image = 0; image < g->images; image++) {
        for (ptrdiff_t y = 0; y < g->out_h; y++) {
            ptrdiff_t c = 0;
            for (; c + 16 <= g->channels; c += 16) {
                NAME(share_row)(g, y, 16, in_deltas + c, out_deltas + c);
            }
            for (; c + 8 <= g->channels; c += 8) {
                NAME(share_row)(g, y, 8, in_deltas + c, out_deltas + c);
            }
            for (; c + 4 <= g->channels; c += 4) {
                NAME(share_row)(g, y, 4, in_deltas + c, out_deltas + c);
            }
            for (; c < g->channels; c++) {
                NAME(share_row)(g, y, 1, in_deltas + c, out_deltas + c);
            }
            out_deltas += g->out_w * g->channels;
        }
        in_deltas += image_size(g);
    }
}

#undef LANES
