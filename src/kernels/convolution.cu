/* Convolution as matrix products: images to patches and back, and the biases. */
#include "images.cuh"

/* One element of the patches: row ky of the window, r elements into its run, for the
 * window whose upper left pixel is (y, x). Both may lie outside the image. */
static __device__ __forceinline__ const float *
element_of(const PatchLayout &l, const float *image, uint32_t y, uint32_t x,
           uint32_t ky, uint32_t r)
{
    uint32_t length = l.window.in_w * l.window.channels;
    int64_t element = (int64_t)(int32_t)x * l.window.channels + r;
    y += ky; /* above the image it is a huge number */
    return y < l.window.in_h && (uint64_t)element < length
               ? image + (size_t)y * length + element
               : NULL;
}

/* Write rows `first` and on of the matrix of patches, `items` float4s in all; where the
 * channels come in aligned fours (V), so do the elements of a run. */
template <int V>
static __device__ __forceinline__ void
copy_patches(const PatchLayout &l, const float *images, float *matrix, uint32_t first,
             uint32_t items)
{
    size_t image_size = (size_t)l.window.in_h * l.window.in_w * l.window.channels;
    GRID_STRIDE(i, items) {
        uint32_t row = quotient((uint32_t)i, l.by_quads);
        uint32_t k = ((uint32_t)i - row * l.quads) * 4;
        row += first;
        uint32_t n = quotient(row, l.by_out_pixels);
        uint32_t pixel = row - n * l.out_pixels;
        uint32_t out_y = quotient(pixel, l.window.by_out_w);
        uint32_t out_x = pixel - out_y * l.window.out_w;
        uint32_t y = out_y * l.window.stride_h - (uint32_t)l.window.padding;
        uint32_t x = out_x * l.window.stride_w - (uint32_t)l.window.padding;
        uint32_t ky = quotient(k, l.by_run);
        uint32_t r = k - ky * l.run;
        const float *image = images + n * image_size;
        Channels<4> value = {{0, 0, 0, 0}};
        if constexpr (V == 4) {
            const float *from = element_of(l, image, y, x, ky, r);
            if (from != NULL) {
                value = load_channels<4>(from);
            }
        }
        else {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                const float *from = element_of(l, image, y, x, ky, r);
                if (from != NULL && k + j < l.patch) {
                    value.at[j] = *from;
                }
                r++;
                if (r == l.run) {
                    r = 0;
                    ky++;
                }
            }
        }
        store_channels<4>(matrix + 4 * i, value);
    }
}

KERNEL
conv_patches_fours(PatchLayout l, const float *images, float *matrix, uint32_t first,
                   uint32_t items)
{
    copy_patches<4>(l, images, matrix, first, items);
}

KERNEL
conv_patches(PatchLayout l, const float *images, float *matrix, uint32_t first,
             uint32_t items)
{
    copy_patches<1>(l, images, matrix, first, items);
}

/* Add to each element of the images what the patches have for it, in the patches'
 * order. The matrix has rows `first` to first + rows - 1 of all that there are for
 * these images. */
template <int V>
static __device__ __forceinline__ void
add_patches(const PatchLayout &l, const float *matrix, float *images, uint32_t first,
            uint32_t rows, uint32_t items)
{
    const WindowLayout &w = l.window;
    GRID_STRIDE(i, items) {
        Place place = place_in_images<V>(w, (uint32_t)i);
        int32_t y = (int32_t)place.y + w.padding, x = (int32_t)place.x + w.padding;
        Range down = windows_over(y, w.window_h, w.stride_h, w.by_stride_h, w.out_h);
        Range across = windows_over(x, w.window_w, w.stride_w, w.by_stride_w, w.out_w);
        uint32_t image_row = place.image * l.out_pixels - first;
        Channels<V> sum = load_channels<V>(images + i * V);
        for (uint32_t out_y = down.first; out_y < down.end; out_y++) {
            uint32_t ky = (uint32_t)y - out_y * w.stride_h;
#pragma unroll 4
            for (uint32_t out_x = across.first; out_x < across.end; out_x++) {
                uint32_t kx = (uint32_t)x - out_x * w.stride_w;
                uint32_t row = image_row + out_y * w.out_w + out_x;
                uint32_t k = (ky * w.window_w + kx) * w.channels + place.channel;
                if (row < rows) { /* those before the first are huge numbers */
                    Channels<V> value =
                        load_channels<V>(matrix + (size_t)row * l.pitch + k);
#pragma unroll
                    for (int j = 0; j < V; j++) {
                        sum.at[j] += value.at[j];
                    }
                }
            }
        }
        store_channels<V>(images + i * V, sum);
    }
}

KERNEL
conv_add_patches_fours(PatchLayout l, const float *matrix, float *images,
                       uint32_t first, uint32_t rows, uint32_t items)
{
    add_patches<4>(l, matrix, images, first, rows, items);
}

KERNEL
conv_add_patches(PatchLayout l, const float *matrix, float *images, uint32_t first,
                 uint32_t rows, uint32_t items)
{
    add_patches<1>(l, matrix, images, first, rows, items);
}

/* Fill n vectors of outputs with the biases. The number of threads is a multiple of the
 * vectors in a pixel, so that each thread stays with its filters. */
template <int V>
static __device__ __forceinline__ void
fill_bias(float *outputs, const float *bias, uint32_t vectors, size_t n)
{
    size_t own = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    Channels<V> value = load_channels<V>(bias + own % vectors * V);
    GRID_STRIDE(i, n) {
        store_channels<V>(outputs + i * V, value);
    }
}

KERNEL
conv_bias_fours(float *outputs, const float *bias, uint32_t vectors, size_t n)
{
    fill_bias<4>(outputs, bias, vectors, n);
}

KERNEL
conv_bias(float *outputs, const float *bias, uint32_t vectors, size_t n)
{
    fill_bias<1>(outputs, bias, vectors, n);
}

enum { SUM_COLUMNS = 32, SUM_GROUPS = 32 };

/* Sum the columns of a matrix: a block 32 of them (blockIdx.x) over `chunk` rows
 * (blockIdx.y), a warp every so many of these rows. The sums of a chunk go to its row
 * of out, which has out_pitch columns, but for those from column `split` on: they go to
 * `rest`. Always in the same order. */
KERNEL
__launch_bounds__(SUM_COLUMNS *SUM_GROUPS)
conv_column_sums(const float *matrix, size_t rows, size_t columns, size_t chunk,
                 float *out, size_t out_pitch, float *rest, size_t split, int is_added)
{
    __shared__ float sums[SUM_GROUPS][SUM_COLUMNS];
    uint32_t lane = threadIdx.x % SUM_COLUMNS, group = threadIdx.x / SUM_COLUMNS;
    uint32_t groups = blockDim.x / SUM_COLUMNS;
    size_t column = blockIdx.x * (size_t)SUM_COLUMNS + lane;
    size_t first = blockIdx.y * chunk;
    size_t end = first + chunk < rows ? first + chunk : rows;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (size_t row = first + group; row < end; row += groups) {
            sum += matrix[row * columns + column];
        }
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0 && column < columns) {
        for (uint32_t i = 1; i < groups; i++) {
            sum += sums[i][lane];
        }
        float *to = column < split ? out + blockIdx.y * out_pitch + column
                                   : rest + (column - split);
        *to = is_added ? *to + sum : sum;
    }
}
