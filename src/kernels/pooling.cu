/* Max and average pooling. Pixels outside the image are no candidates for a maximum and
 * do not count in an average. What a thread adds up it adds in the windows' order. */
#include "images.cuh"

#include <float.h>

/* Write each window's maximum, and the index of its element within the image; of equal
 * ones the first counts, NaN is never greater. 0 and -1 where there is none. */
template <int V>
static __device__ __forceinline__ void
max_forward(const WindowLayout &l, const float *inputs, float *outputs, float *argmax,
            uint32_t items)
{
    size_t image_size = (size_t)l.in_h * l.in_w * l.channels;
    GRID_STRIDE(i, items) {
        Place place = place_in_outputs<V>(l, (uint32_t)i);
        Range down = pixels_in(place.y, l.window_h, l.stride_h, l.padding, l.in_h);
        Range across = pixels_in(place.x, l.window_w, l.stride_w, l.padding, l.in_w);
        const float *image = inputs + place.image * image_size;
        Channels<V> best;
        int32_t where[V];
#pragma unroll
        for (int j = 0; j < V; j++) {
            best.at[j] = -FLT_MAX;
            where[j] = -1;
        }
        for (uint32_t y = down.first; y < down.end; y++) {
            uint32_t k = (y * l.in_w + across.first) * l.channels + place.channel;
#pragma unroll 4
            for (uint32_t x = across.first; x < across.end; x++, k += l.channels) {
                Channels<V> value = load_channels<V>(image + k);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    if (value.at[j] > best.at[j]) {
                        best.at[j] = value.at[j];
                        where[j] = (int32_t)k + j;
                    }
                }
            }
        }
        Channels<V> index;
#pragma unroll
        for (int j = 0; j < V; j++) {
            index.at[j] = (float)where[j];
            best.at[j] = where[j] < 0 ? 0.0f : best.at[j];
        }
        store_channels<V>(outputs + i * V, best);
        store_channels<V>(argmax + i * V, index);
    }
}

KERNEL
maxpool_forward_fours(WindowLayout l, const float *inputs, float *outputs,
                      float *argmax, uint32_t items)
{
    max_forward<4>(l, inputs, outputs, argmax, items);
}

KERNEL
maxpool_forward(WindowLayout l, const float *inputs, float *outputs, float *argmax,
                uint32_t items)
{
    max_forward<1>(l, inputs, outputs, argmax, items);
}

enum { NO_INDEX = 0xffffffffu };

/* The index within an image that argmax stands for; NO_INDEX where it says that there
 * is none, and a number beyond every image for what is beyond 32 bits. */
static __device__ __forceinline__ uint32_t
index_of(float argmax)
{
    if (!(argmax > -1.0f)) { /* NaN too */
        return NO_INDEX;
    }
    return argmax < 2147483648.0f ? (uint32_t)argmax : 0x80000000u;
}

/* Whether an index, below the image's size, lies in the window of an output. Only its
 * pixel counts: where float32 has rounded the index, the channel may be another one. */
static __device__ __forceinline__ bool
is_in_window(const WindowLayout &l, uint32_t index, uint32_t out_y, uint32_t out_x)
{
    uint32_t pixel = quotient(index, l.by_channels);
    uint32_t y = quotient(pixel, l.by_in_w);
    uint32_t x = pixel - y * l.in_w;
    int64_t down = (int64_t)y + l.padding - (int64_t)out_y * l.stride_h;
    int64_t across = (int64_t)x + l.padding - (int64_t)out_x * l.stride_w;
    return (uint64_t)down < l.window_h && (uint64_t)across < l.window_w;
}

/* Add to each element of in_deltas the deltas of the windows over it whose maximum it
 * was. An argmax may also name a pixel outside its window (whoever made it): then
 * *strays becomes `mark`, and maxpool_strays adds it. One beyond the image is a fault.
 */
template <int V>
static __device__ __forceinline__ void
max_backward(const WindowLayout &l, const float *argmax, const float *out_deltas,
             float *in_deltas, uint32_t items, uint32_t out_items, uint32_t *strays,
             uint32_t mark, volatile int *fault, int fault_number)
{
    uint32_t image_size = l.in_h * l.in_w * l.channels;
    size_t out_size = (size_t)l.out_h * l.out_w * l.channels;
    GRID_STRIDE(i, items) {
        Place place = place_in_images<V>(l, (uint32_t)i);
        int32_t y = (int32_t)place.y + l.padding, x = (int32_t)place.x + l.padding;
        Range down = windows_over(y, l.window_h, l.stride_h, l.by_stride_h, l.out_h);
        Range across = windows_over(x, l.window_w, l.stride_w, l.by_stride_w, l.out_w);
        uint32_t pixel = (place.y * l.in_w + place.x) * l.channels;
        size_t image_at = place.image * out_size + place.channel;
        Channels<V> sum = load_channels<V>(in_deltas + i * V);
        for (uint32_t out_y = down.first; out_y < down.end; out_y++) {
            size_t at = image_at + (out_y * l.out_w + across.first) * l.channels;
#pragma unroll 2
            for (uint32_t out_x = across.first; out_x < across.end; out_x++) {
                Channels<V> position = load_channels<V>(argmax + at);
                Channels<V> delta = load_channels<V>(out_deltas + at);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    if (index_of(position.at[j]) - pixel < l.channels) {
                        sum.at[j] += delta.at[j];
                    }
                }
                at += l.channels;
            }
        }
        store_channels<V>(in_deltas + i * V, sum);
    }
    GRID_STRIDE(i, out_items) {
        Place place = place_in_outputs<V>(l, (uint32_t)i);
        Channels<V> position = load_channels<V>(argmax + i * V);
#pragma unroll
        for (int j = 0; j < V; j++) {
            uint32_t index = index_of(position.at[j]);
            if (index == NO_INDEX) {
                continue;
            }
            if (index >= image_size) {
                *fault = fault_number;
            }
            else if (!is_in_window(l, index, place.y, place.x)) {
                *strays = mark;
            }
        }
    }
}

KERNEL
maxpool_backward_fours(WindowLayout l, const float *argmax, const float *out_deltas,
                       float *in_deltas, uint32_t items, uint32_t out_items,
                       uint32_t *strays, uint32_t mark, volatile int *fault,
                       int fault_number)
{
    max_backward<4>(l, argmax, out_deltas, in_deltas, items, out_items, strays, mark,
                    fault, fault_number);
}

KERNEL
maxpool_backward(WindowLayout l, const float *argmax, const float *out_deltas,
                 float *in_deltas, uint32_t items, uint32_t out_items,
                 uint32_t *strays, uint32_t mark, volatile int *fault,
                 int fault_number)
{
    max_backward<1>(l, argmax, out_deltas, in_deltas, items, out_items, strays, mark,
                    fault, fault_number);
}

enum { STRAYS_AHEAD = 16 };

/* If *strays is `mark`, add the deltas whose argmax lies outside its window, a thread
 * those of one channel of an image; there are `items` of these. Looked at some at a
 * time, as it is mostly waiting for memory. */
KERNEL
maxpool_strays(WindowLayout l, const float *argmax, const float *out_deltas,
               float *in_deltas, size_t items, const uint32_t *strays, uint32_t mark)
{
    uint32_t image_size = l.in_h * l.in_w * l.channels;
    uint32_t out_pixels = l.out_h * l.out_w;
    if (*strays != mark) {
        return;
    }
    GRID_STRIDE(i, items) {
        size_t image = i / l.channels;
        uint32_t channel = (uint32_t)(i - image * l.channels);
        size_t at = image * out_pixels * l.channels + channel;
        float *deltas = in_deltas + image * image_size + channel;
        for (uint32_t first = 0; first < out_pixels; first += STRAYS_AHEAD) {
            float positions[STRAYS_AHEAD];
#pragma unroll
            for (uint32_t j = 0; j < STRAYS_AHEAD; j++) {
                positions[j] = first + j < out_pixels
                                   ? argmax[at + (size_t)j * l.channels]
                                   : -1.0f;
            }
#pragma unroll
            for (uint32_t j = 0; j < STRAYS_AHEAD; j++) {
                uint32_t index = index_of(positions[j]);
                uint32_t y = quotient(first + j, l.by_out_w);
                uint32_t x = first + j - y * l.out_w;
                if (index < image_size && !is_in_window(l, index, y, x)) {
                    deltas[(size_t)quotient(index, l.by_channels) * l.channels] +=
                        out_deltas[at + (size_t)j * l.channels];
                }
            }
            at += (size_t)STRAYS_AHEAD * l.channels;
        }
    }
}

/* What an average is divided by: an empty window's sum is 0 whatever divides it. */
static __device__ __forceinline__ float
pixels_of(Range down, Range across)
{
    uint32_t pixels = (down.end - down.first) * (across.end - across.first);
    return (float)(pixels > 0 ? pixels : 1);
}

template <int V>
static __device__ __forceinline__ void
mean_forward(const WindowLayout &l, const float *inputs, float *outputs, uint32_t items)
{
    size_t image_size = (size_t)l.in_h * l.in_w * l.channels;
    GRID_STRIDE(i, items) {
        Place place = place_in_outputs<V>(l, (uint32_t)i);
        Range down = pixels_in(place.y, l.window_h, l.stride_h, l.padding, l.in_h);
        Range across = pixels_in(place.x, l.window_w, l.stride_w, l.padding, l.in_w);
        const float *image = inputs + place.image * image_size + place.channel;
        Channels<V> sum = {};
        for (uint32_t y = down.first; y < down.end; y++) {
            const float *row = image + (size_t)y * l.in_w * l.channels;
#pragma unroll 4
            for (uint32_t x = across.first; x < across.end; x++) {
                Channels<V> value = load_channels<V>(row + (size_t)x * l.channels);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    sum.at[j] += value.at[j];
                }
            }
        }
        float pixels = pixels_of(down, across);
#pragma unroll
        for (int j = 0; j < V; j++) {
            sum.at[j] /= pixels;
        }
        store_channels<V>(outputs + i * V, sum);
    }
}

KERNEL
avgpool_forward_fours(WindowLayout l, const float *inputs, float *outputs,
                      uint32_t items)
{
    mean_forward<4>(l, inputs, outputs, items);
}

KERNEL
avgpool_forward(WindowLayout l, const float *inputs, float *outputs, uint32_t items)
{
    mean_forward<1>(l, inputs, outputs, items);
}

/* Add to each element of in_deltas its share of the deltas of the windows over it. */
template <int V>
static __device__ __forceinline__ void
mean_backward(const WindowLayout &l, const float *out_deltas, float *in_deltas,
              uint32_t items)
{
    size_t out_size = (size_t)l.out_h * l.out_w * l.channels;
    GRID_STRIDE(i, items) {
        Place place = place_in_images<V>(l, (uint32_t)i);
        int32_t y = (int32_t)place.y + l.padding, x = (int32_t)place.x + l.padding;
        Range down = windows_over(y, l.window_h, l.stride_h, l.by_stride_h, l.out_h);
        Range across = windows_over(x, l.window_w, l.stride_w, l.by_stride_w, l.out_w);
        size_t image_at = place.image * out_size + place.channel;
        Channels<V> sum = load_channels<V>(in_deltas + i * V);
        for (uint32_t out_y = down.first; out_y < down.end; out_y++) {
            Range rows = pixels_in(out_y, l.window_h, l.stride_h, l.padding, l.in_h);
            size_t at = image_at + (out_y * l.out_w + across.first) * l.channels;
#pragma unroll 2
            for (uint32_t out_x = across.first; out_x < across.end; out_x++) {
                Range columns =
                    pixels_in(out_x, l.window_w, l.stride_w, l.padding, l.in_w);
                float pixels = pixels_of(rows, columns);
                Channels<V> delta = load_channels<V>(out_deltas + at);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    sum.at[j] += delta.at[j] / pixels;
                }
                at += l.channels;
            }
        }
        store_channels<V>(in_deltas + i * V, sum);
    }
}

KERNEL
avgpool_backward_fours(WindowLayout l, const float *out_deltas, float *in_deltas,
                       uint32_t items)
{
    mean_backward<4>(l, out_deltas, in_deltas, items);
}

KERNEL
avgpool_backward(WindowLayout l, const float *out_deltas, float *in_deltas,
                 uint32_t items)
{
    mean_backward<1>(l, out_deltas, in_deltas, items);
}
