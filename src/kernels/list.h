/* Names of all kernels, for the C side (kernels.c) and for whoever runs them elsewhere.
 *
 * Each MAP is an elementwise operation and stands for two kernels: name_flat, where
 * every array is contiguous, and name_strided, for any strides. */
#ifndef BRAINSTORM_DBUF_KERNEL_LIST_H
#define BRAINSTORM_DBUF_KERNEL_LIST_H

#define MAPS(X) \
    X(abs) \
    X(add) \
    X(add_if) \
    X(add_scalar) \
    X(clip) \
    X(copy) \
    X(copy_if) \
    X(divide) \
    X(el) \
    X(el_deriv) \
    X(el_of_sum) \
    X(fill) \
    X(fill_if) \
    X(log) \
    X(modulo) \
    X(mult) \
    X(mult_add) \
    X(mult_add_scalar) \
    X(mult_scalar) \
    X(power) \
    X(rel) \
    X(rel_deriv) \
    X(rel_of_sum) \
    X(sigmoid) \
    X(sigmoid_deriv) \
    X(sigmoid_of_sum) \
    X(sign) \
    X(sqrt) \
    X(subtract) \
    X(tanh) \
    X(tanh_deriv) \
    X(tanh_of_sum) \
    X(accumulate)

/* The kernels that MAPS stands for. */
#define MAP_KERNELS(X) \
    X(abs_flat) X(abs_strided) \
    X(add_flat) X(add_strided) \
    X(add_if_flat) X(add_if_strided) \
    X(add_scalar_flat) X(add_scalar_strided) \
    X(clip_flat) X(clip_strided) \
    X(copy_flat) X(copy_strided) \
    X(copy_if_flat) X(copy_if_strided) \
    X(divide_flat) X(divide_strided) \
    X(el_flat) X(el_strided) \
    X(el_deriv_flat) X(el_deriv_strided) \
    X(el_of_sum_flat) X(el_of_sum_strided) \
    X(fill_flat) X(fill_strided) \
    X(fill_if_flat) X(fill_if_strided) \
    X(log_flat) X(log_strided) \
    X(modulo_flat) X(modulo_strided) \
    X(mult_flat) X(mult_strided) \
    X(mult_add_flat) X(mult_add_strided) \
    X(mult_add_scalar_flat) X(mult_add_scalar_strided) \
    X(mult_scalar_flat) X(mult_scalar_strided) \
    X(power_flat) X(power_strided) \
    X(rel_flat) X(rel_strided) \
    X(rel_deriv_flat) X(rel_deriv_strided) \
    X(rel_of_sum_flat) X(rel_of_sum_strided) \
    X(sigmoid_flat) X(sigmoid_strided) \
    X(sigmoid_deriv_flat) X(sigmoid_deriv_strided) \
    X(sigmoid_of_sum_flat) X(sigmoid_of_sum_strided) \
    X(sign_flat) X(sign_strided) \
    X(sqrt_flat) X(sqrt_strided) \
    X(subtract_flat) X(subtract_strided) \
    X(tanh_flat) X(tanh_strided) \
    X(tanh_deriv_flat) X(tanh_deriv_strided) \
    X(tanh_of_sum_flat) X(tanh_of_sum_strided) \
    X(accumulate_flat) X(accumulate_strided)

/* The others, by the file that they are in. */
#define REDUCE_KERNELS(X) \
    X(sum_rows) X(sum_columns) X(softmax_rows) X(softmax_long_rows) X(find_nonfinite)
#define ROW_KERNELS(X) \
    X(merge_rows) X(split_add_rows) X(binarize_rows) X(index_rows)
#define RANDOM_KERNELS(X) X(gaussian_fill) X(probability_mask)
#define CONVOLUTION_KERNELS(X) \
    X(conv_add_patches) X(conv_add_patches_fours) \
    X(conv_bias) X(conv_bias_fours) \
    X(conv_column_sums) \
    X(conv_patches) X(conv_patches_fours)
#define POOLING_KERNELS(X) \
    X(avgpool_backward) X(avgpool_backward_fours) \
    X(avgpool_forward) X(avgpool_forward_fours) \
    X(maxpool_backward) X(maxpool_backward_fours) \
    X(maxpool_forward) X(maxpool_forward_fours) \
    X(maxpool_strays)
#define RECURRENT_KERNELS(X) \
    X(recurrent_copy_rows) X(recurrent_add_rows) \
    X(recurrent_forward_step) X(recurrent_backward_step) \
    X(lstm_forward_step) X(lstm_backward_step) \
    X(recurrent_sum_rows) X(lstm_sum_rows) X(recurrent_add_sums)
#define SOFTMAX_CE_KERNELS(X) X(softmax_ce_losses) X(softmax_ce_deltas)
#define UNPACK_KERNELS(X) X(unpack)

#define KERNELS(X) \
    MAP_KERNELS(X) \
    REDUCE_KERNELS(X) \
    ROW_KERNELS(X) \
    RANDOM_KERNELS(X) \
    CONVOLUTION_KERNELS(X) \
    POOLING_KERNELS(X) \
    RECURRENT_KERNELS(X) \
    SOFTMAX_CE_KERNELS(X) \
    UNPACK_KERNELS(X)

#endif
