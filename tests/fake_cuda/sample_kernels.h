/* Names of the kernels in sample_kernels.cu. */

#ifndef SAMPLE_KERNELS_H
#define SAMPLE_KERNELS_H

#define KERNELS(X) \
    X(add_value) X(places) X(sum) X(reverse) X(scale_all) X(warp_things) \
    X(count_atomically) X(grid_maximum) X(philox_block) X(random_numbers) \
    X(left_behind) X(two_places) X(half_a_warp) X(beyond_shared) X(deep) X(idle)

#endif
