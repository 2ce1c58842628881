/* The module brainstorm_dbuf._cpuop: its table of functions and their documentation.

   Names, order and keywords of the arguments are those that brainstorm calls. The
   module has no state of its own. */

#define CPUOP_IMPORTS_NUMPY
#include "cpuop.h"

PyDoc_STRVAR(maxpool_forward_doc,
"maxpool_forward($module, /, inputs, kernel, outputs, padding, strides, argmax)\n"
"--\n\n"
"Write the maximum of every window of inputs to outputs, its index to argmax.\n\n"
"Images are (images, height, width, channels), float32 or float64, C-contiguous;\n"
"argmax has the shape and dtype of outputs and gets\n"
"(y * width + x) * channels + channel of the first maximum. Padding and NaN are\n"
"never a maximum; a window with none gives 0 and -1. kernel and strides are\n"
"(vertical, horizontal).\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written.");

PyDoc_STRVAR(maxpool_backward_doc,
"maxpool_backward($module, /, inputs, kernel, outputs, padding, strides, argmax,\n"
"                 in_deltas, out_deltas)\n"
"--\n\n"
"Add each delta of out_deltas to in_deltas where argmax says the maximum was.\n\n"
"in_deltas has the shape of inputs; argmax and out_deltas that of outputs; of inputs\n"
"and outputs only the shapes matter. A negative index is skipped.\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written;\n"
"also for an index in argmax that lies outside an image.");

PyDoc_STRVAR(avgpool_forward_doc,
"avgpool_forward($module, /, inputs, kernel, outputs, padding, strides)\n"
"--\n\n"
"Write the mean of every window of inputs to outputs.\n\n"
"Images are (images, height, width, channels), float32 or float64, C-contiguous.\n"
"Only pixels that are not padding count; a window with none gives 0. kernel and\n"
"strides are (vertical, horizontal).\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written.");

PyDoc_STRVAR(avgpool_backward_doc,
"avgpool_backward($module, /, inputs, kernel, outputs, padding, strides, in_deltas,\n"
"                 out_deltas)\n"
"--\n\n"
"Add to in_deltas each delta of out_deltas, shared among the pixels of its window.\n\n"
"in_deltas has the shape of inputs, out_deltas that of outputs; of inputs and\n"
"outputs only the shapes matter. Only pixels that are not padding count.\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written.");

PyDoc_STRVAR(im2col_doc,
"im2col($module, /, flat_in, height, width, channels, kernel_h, kernel_w, pad_t,\n"
"       pad_l, pad_b, pad_r, stride_h, stride_w, flat_col)\n"
"--\n\n"
"Copy every patch of one image to flat_col, one after the other.\n\n"
"flat_in is the image (height, width, channels), flattened; flat_col gets\n"
"(patches down, patches across, kernel_h, kernel_w, channels), flattened, padding as\n"
"zeros. Both are 1-D, C-contiguous, float32 or float64; what is longer than needed\n"
"is left alone.\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written.");

PyDoc_STRVAR(col2im_doc,
"col2im($module, /, flat_col, height, width, channels, kernel_h, kernel_w, pad_t,\n"
"       pad_l, pad_b, pad_r, stride_h, stride_w, flat_in)\n"
"--\n\n"
"Add every patch of flat_col onto the pixels of flat_in it covers.\n\n"
"The arrays are those of im2col; what lies on padding is dropped.\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written.");

PyDoc_STRVAR(crop_images_doc,
"_crop_images($module, /, inputs, height, width, row_indices, col_indices, outputs)\n"
"--\n\n"
"Copy a height by width rectangle of every image of inputs to outputs.\n\n"
"inputs is (time steps, images, height, width, channels), float32 or float64,\n"
"C-contiguous; outputs the same but for height and width. row_indices and\n"
"col_indices are 1-D, of any integer dtype, and hold the upper left corner for each\n"
"image of the batch.\n\n"
"Raises TypeError or ValueError, naming the argument, before anything is written;\n"
"also for a crop that would leave its image.");

#define OP(name, function, doc)                                                       \
    {name, (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS, doc}

static PyMethodDef module_methods[] = {
    OP("maxpool_forward", cpuop_maxpool_forward, maxpool_forward_doc),
    OP("maxpool_backward", cpuop_maxpool_backward, maxpool_backward_doc),
    OP("avgpool_forward", cpuop_avgpool_forward, avgpool_forward_doc),
    OP("avgpool_backward", cpuop_avgpool_backward, avgpool_backward_doc),
    OP("im2col", cpuop_im2col, im2col_doc),
    OP("col2im", cpuop_col2im, col2im_doc),
    OP("_crop_images", cpuop_crop_images, crop_images_doc),
    {NULL, NULL, 0, NULL},
};

static int
module_exec(PyObject *Py_UNUSED(module))
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        /* Of those with a GIL of their own Python 3.12 says it, of others nobody. */
        PyErr_SetString(PyExc_ImportError, "module brainstorm_dbuf._cpuop does not "
                                           "support loading in subinterpreters");
        return -1;
    }
    import_array1(-1);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_multiple_interpreters
    /* NumPy itself does not support them. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(module_doc,
"Patches, pooling and cropping for brainstorm's NumpyHandler and iterators, in C.\n\n"
"Every op lets go of the GIL while it works.");

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "brainstorm_dbuf._cpuop",
    .m_doc = module_doc,
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__cpuop(void)
{
    return PyModuleDef_Init(&module_def);
}
