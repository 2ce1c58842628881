/* Operations on the rows of matrices: merging and splitting them, one-hot rows and the
 * choice of one element a row. */
#include "common.cuh"

/* Sizes and pitches are in T. */
template <typename T>
static __device__ __forceinline__ void
merge_as(T *out, const T *a, const T *b, size_t rows, size_t a_columns,
         size_t b_columns, size_t out_pitch, size_t a_pitch, size_t b_pitch,
         unsigned int lanes)
{
    EACH_ROW(row, rows, lanes) {
        EACH_COLUMN(column, a_columns + b_columns, lanes) {
            out[row * out_pitch + column] = column < a_columns
                                                ? a[row * a_pitch + column]
                                                : b[row * b_pitch + column - a_columns];
        }
    }
}

/* Lay the rows of a and b side by side into out. With `fours`, all sizes, pitches and
 * addresses are multiples of four elements. */
KERNEL
merge_rows(float *out, const float *a, const float *b, size_t rows, size_t a_columns,
           size_t b_columns, size_t out_pitch, size_t a_pitch, size_t b_pitch,
           unsigned int lanes, int fours)
{
    if (fours) {
        merge_as(reinterpret_cast<float4 *>(out), reinterpret_cast<const float4 *>(a),
                 reinterpret_cast<const float4 *>(b), rows, a_columns / 4,
                 b_columns / 4, out_pitch / 4, a_pitch / 4, b_pitch / 4, lanes);
    }
    else {
        merge_as(out, a, b, rows, a_columns, b_columns, out_pitch, a_pitch, b_pitch,
                 lanes);
    }
}

static __device__ __forceinline__ void
add_to(float *to, float x)
{
    *to += x;
}

static __device__ __forceinline__ void
add_to(float4 *to, float4 x)
{
    float4 y = *to;
    *to = make_float4(y.x + x.x, y.y + x.y, y.z + x.z, y.w + x.w);
}

template <typename T>
static __device__ __forceinline__ void
split_add_as(T *out_a, T *out_b, const T *x, size_t rows, size_t a_columns,
             size_t b_columns, size_t a_pitch, size_t b_pitch, size_t x_pitch,
             unsigned int lanes)
{
    EACH_ROW(row, rows, lanes) {
        EACH_COLUMN(column, a_columns + b_columns, lanes) {
            T *to = column < a_columns ? out_a + row * a_pitch + column
                                       : out_b + row * b_pitch + column - a_columns;
            add_to(to, x[row * x_pitch + column]);
        }
    }
}

/* Add the first columns of x to out_a and the others to out_b, which lie apart. */
KERNEL
split_add_rows(float *out_a, float *out_b, const float *x, size_t rows,
               size_t a_columns, size_t b_columns, size_t a_pitch, size_t b_pitch,
               size_t x_pitch, unsigned int lanes, int fours)
{
    if (fours) {
        split_add_as(reinterpret_cast<float4 *>(out_a),
                     reinterpret_cast<float4 *>(out_b),
                     reinterpret_cast<const float4 *>(x), rows, a_columns / 4,
                     b_columns / 4, a_pitch / 4, b_pitch / 4, x_pitch / 4, lanes);
    }
    else {
        split_add_as(out_a, out_b, x, rows, a_columns, b_columns, a_pitch, b_pitch,
                     x_pitch, lanes);
    }
}

/* The column that a float names, as in NumPy: what is behind the point is cut off, and
 * -1 is the last. Returns n if there is no such column; NaN names none. */
static __device__ __forceinline__ size_t
column_of(float value, size_t n)
{
    const double whole = truncf(value);
    if (!(whole >= -(double)n && whole < (double)n)) {
        return n;
    }
    return (size_t)(whole < 0 ? whole + (double)n : whole);
}

/* Make each row of out one-hot. A row whose v names no column is left as it is. */
KERNEL
binarize_rows(float *out, const float *v, size_t rows, size_t columns, size_t out_row,
              size_t out_column, size_t v_stride, unsigned int lanes, int *fault,
              int number)
{
    EACH_ROW(row, rows, lanes) {
        const size_t one = column_of(v[row * v_stride], columns);
        if (one == columns) {
            *fault = number;
            continue;
        }
        EACH_COLUMN(column, columns, lanes) {
            out[row * out_row + column * out_column] = column == one ? 1.0f : 0.0f;
        }
    }
}

/* Take from each row of m the element that v names, none if v names no column. */
KERNEL
index_rows(float *out, const float *m, const float *v, size_t rows, size_t columns,
           size_t out_stride, size_t m_row, size_t m_column, size_t v_stride,
           int *fault, int number)
{
    GRID_STRIDE(row, rows) {
        const size_t column = column_of(v[row * v_stride], columns);
        if (column == columns) {
            *fault = number;
        }
        else {
            out[row * out_stride] = m[row * m_row + column * m_column];
        }
    }
}
