/* Shapes of convolution and pooling, passed to their kernels by value. Read by C
 * (convolution.c, pooling.c) and by the kernels.
 *
 * Images are contiguous, channels last: (images, height, width, channels). A window
 * starts every `stride` pixels, the first of them `padding` pixels above and left of
 * the image. The C side keeps all numbers small enough for the kernels' 32-bit
 * arithmetic: an image has at most IMAGE_MOST elements, and a padding, stride or window
 * reaches at most IMAGE_REACH pixels. */
#ifndef BRAINSTORM_DBUF_KERNELS_IMAGES_H
#define BRAINSTORM_DBUF_KERNELS_IMAGES_H

#include <stdint.h>

enum { IMAGE_MOST = 1 << 30, IMAGE_REACH = 1 << 29 };

/* Dividing any 32-bit number by a fixed one with a multiplication and a shift: the
 * quotient of n is (high word of n * multiplier, plus n) >> shift. */
typedef struct {
    uint32_t multiplier, shift;
} Divisor;

/* For 1 to 2^31. */
static inline Divisor
divisor_of(uint32_t divisor)
{
    uint32_t shift = 0;
    while (((uint64_t)1 << shift) < divisor) {
        shift++;
    }
    uint64_t excess = ((uint64_t)1 << shift) - divisor;
    Divisor result = {(uint32_t)((excess << 32) / divisor + 1), shift};
    return result;
}

/* How the windows lie in the images. */
typedef struct {
    uint32_t in_h, in_w, channels;
    uint32_t out_h, out_w;
    uint32_t window_h, window_w;
    uint32_t stride_h, stride_w;
    int32_t padding;
    uint32_t vectors; /* of as many channels as a thread takes, in a pixel */
    Divisor by_vectors, by_channels, by_in_h, by_in_w, by_out_h, by_out_w;
    Divisor by_stride_h, by_stride_w;
} WindowLayout;

/* How the patches of a convolution lie in their matrix. A row is a patch: the rows of
 * its window one after the other, in each the pixels with all their channels, so that
 * a row of the window is one run of elements in the image too. */
typedef struct {
    WindowLayout window;
    uint32_t out_pixels; /* patches in an image */
    uint32_t run;        /* elements in a row of a window */
    uint32_t patch;      /* elements in a window */
    uint32_t pitch;      /* distance of the matrix's rows: a multiple of 4 */
    uint32_t quads;      /* a quarter of the pitch */
    Divisor by_out_pixels, by_run, by_quads;
} PatchLayout;

#endif
