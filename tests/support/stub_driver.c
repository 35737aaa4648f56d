// A CUDA driver without a device: modules, functions and contexts are numbers, memory is the host's, and a launch calls
// `seen`, if there is one, instead of running anything.

#include <string.h>

#include "cuda.h"

typedef int (*seen_t)(const CUlaunchConfig *config, CUfunction function, void **parameters);

static seen_t seen = NULL;
static size_t made = 0;

void stub_seen(seen_t found) { seen = found; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    return seen ? seen(config, function, parameters) : CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

// A map is what it was made from.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    cuuint64_t head[] = {type, rank, (cuuint64_t)address, swizzle, fill};
    char *into = (char *)map;
    memset(map, 0, sizeof *map);
    memcpy(into, head, sizeof head);
    memcpy(into += sizeof head, dims, rank * sizeof *dims);
    memcpy(into += rank * sizeof *dims, strides, (rank - 1) * sizeof *strides);
    memcpy(into += (rank - 1) * sizeof *strides, box, rank * sizeof *box);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)++made;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)++made;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = 227 << 10;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "an error of the stub";
    return CUDA_SUCCESS;
}

#define NOTHING(name, ...) \
    CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuCtxGetDevice, CUdevice *device)
NOTHING(cuCtxGetLimit, size_t *value, CUlimit limit)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuDeviceGet, CUdevice *device, int number)
NOTHING(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
NOTHING(cuDriverGetVersion, int *version)
NOTHING(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)
NOTHING(cuInit, unsigned int flags)
