/* The one translation unit of the kernels: nvcc makes one image of it. */
#include "common.cuh"

#include "elementwise.cu"
#include "reduce.cu"
#include "rows.cu"
#include "random.cu"
#include "convolution.cu"
#include "pooling.cu"
#include "recurrent.cu"
#include "softmax_ce.cu"
#include "unpack.cu"
