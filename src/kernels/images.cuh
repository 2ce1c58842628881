/* What the kernels of convolution and pooling share. */
#ifndef BRAINSTORM_DBUF_KERNELS_IMAGES_CUH
#define BRAINSTORM_DBUF_KERNELS_IMAGES_CUH

#include "common.cuh"
#include "images.h"

static __device__ __forceinline__ uint32_t
quotient(uint32_t n, Divisor divisor)
{
    uint32_t high = (uint32_t)(((uint64_t)n * divisor.multiplier) >> 32);
    return (uint32_t)(((uint64_t)high + n) >> divisor.shift);
}

/* V neighbouring channels: 1, or 4 that lie aligned. */
template <int V>
struct Channels {
    float at[V];
};

template <int V>
static __device__ __forceinline__ Channels<V>
load_channels(const float *from)
{
    Channels<V> value;
    if constexpr (V == 4) {
        float4 four = *reinterpret_cast<const float4 *>(from);
        value.at[0] = four.x;
        value.at[1] = four.y;
        value.at[2] = four.z;
        value.at[3] = four.w;
    }
    else {
        value.at[0] = *from;
    }
    return value;
}

template <int V>
static __device__ __forceinline__ void
store_channels(float *to, const Channels<V> &value)
{
    if constexpr (V == 4) {
        *reinterpret_cast<float4 *>(to) =
            make_float4(value.at[0], value.at[1], value.at[2], value.at[3]);
    }
    else {
        *to = value.at[0];
    }
}

/* A pixel of the images or of the outputs, and the first of a thread's channels. */
struct Place {
    uint32_t image, y, x, channel;
};

/* The place of the i-th vector of images that are `height` by `width` pixels large. */
template <int V>
static __device__ __forceinline__ Place
place_of(const WindowLayout &l, uint32_t i, uint32_t height, Divisor by_height,
         uint32_t width, Divisor by_width)
{
    uint32_t pixel = quotient(i, l.by_vectors);
    uint32_t row = quotient(pixel, by_width);
    Place place;
    place.channel = (i - pixel * l.vectors) * V;
    place.x = pixel - row * width;
    place.image = quotient(row, by_height);
    place.y = row - place.image * height;
    return place;
}

template <int V>
static __device__ __forceinline__ Place
place_in_images(const WindowLayout &l, uint32_t i)
{
    return place_of<V>(l, i, l.in_h, l.by_in_h, l.in_w, l.by_in_w);
}

template <int V>
static __device__ __forceinline__ Place
place_in_outputs(const WindowLayout &l, uint32_t i)
{
    return place_of<V>(l, i, l.out_h, l.by_out_h, l.out_w, l.by_out_w);
}

/* Windows first to end - 1 along one axis. */
struct Range {
    uint32_t first, end;
};

/* The windows that cover a pixel, of `count` along its axis. `place` is the pixel's
 * from where the first window starts; it may be negative. */
static __device__ __forceinline__ Range
windows_over(int32_t place, uint32_t window, uint32_t stride, Divisor by_stride,
             uint32_t count)
{
    Range range = {0, 0};
    if (place >= (int32_t)window) {
        range.first = quotient((uint32_t)place - window, by_stride) + 1;
    }
    if (place >= 0) {
        uint32_t end = quotient((uint32_t)place, by_stride) + 1;
        range.end = end < count ? end : count;
    }
    return range;
}

/* The pixels of a window that lie inside the image, along one axis. The windows of a
 * pooling may lie anywhere: there may be more of them than fit. */
static __device__ __forceinline__ Range
pixels_in(uint32_t number, uint32_t window, uint32_t stride, int32_t padding,
          uint32_t length)
{
    int64_t first = (int64_t)number * stride - padding;
    int64_t end = first + window;
    Range range;
    range.first = (uint32_t)(first < 0 ? 0 : first > length ? length : first);
    range.end = (uint32_t)(end < 0 ? 0 : end > length ? length : end);
    return range;
}

#endif
