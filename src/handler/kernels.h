/* The kernels' image (kernels.c), for engine.c and core.c. */
#ifndef BRAINSTORM_DBUF_HANDLER_KERNELS_H
#define BRAINSTORM_DBUF_HANDLER_KERNELS_H

#include "handler.h"

/* 1 if the extension was built with an image, else 0. */
int kernels_built(void);

/* Load the image and look all kernels up. Return 0, or -1 with an error set. */
int kernels_load(EngineObject *engine);
CUresult kernels_unload(EngineObject *engine);

#endif
