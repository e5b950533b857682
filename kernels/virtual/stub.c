/* Receives what compiled host code asks of CUDA, hands it to the virtual GPU.
 *
 * Named by CUTE_DSL_LIBS, it takes the place of the CUDA runtime: one device, whose memory is the host's. The three
 * calls that carry content (load, map, launch) go to functions that the process sets; the rest answer success.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    unsigned int id, pad;
    unsigned char value[64];
} attribute;

typedef struct {
    unsigned int grid[3], block[3];
    size_t shared;
    void *stream;
    attribute *attributes;
    unsigned int count;
} configuration;

typedef int (*load_function)(void **library, const void *code);
typedef int (*kernel_function)(void **kernel, void *library, const char *name);
typedef int (*launch_function)(const configuration *how, void *kernel, void **arguments);
typedef int (*map_function)(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                            int swizzle);
typedef int (*attribute_function)(int which);

static load_function on_load;
static kernel_function on_kernel;
static launch_function on_launch;
static map_function on_map;
static attribute_function on_attribute;

void virtual_gpu_connect(load_function load, kernel_function kernel, launch_function launch, map_function map,
                         attribute_function device) {
    on_load = load;
    on_kernel = kernel;
    on_launch = launch;
    on_map = map;
    on_attribute = device;
}

#define NOT_CONNECTED 3 /* cudaErrorInitializationError */

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return on_load ? on_load(library, code) : NOT_CONNECTED;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return on_kernel ? on_kernel(kernel, library, name) : NOT_CONNECTED;
}
int _cudaLaunchKernelEx(const configuration *how, void *kernel, void **arguments) {
    return on_launch ? on_launch(how, kernel, arguments) : NOT_CONNECTED;
}
int _cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                            int swizzle, int promotion, int fill) {
    return on_map ? on_map(map, type, rank, address, dims, strides, box, steps, interleave, swizzle) : NOT_CONNECTED;
}
int _cudaDeviceGetAttribute(int *value, int which, int device) {
    *value = on_attribute ? on_attribute(which) : 0;
    return 0;
}
int _cuKernelGetAttribute(int *value, int which, void *kernel, int device) {
    *value = 0;
    return 0;
}
int _cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device) { return 0; }
int _cudaFuncSetAttribute(const void *kernel, int which, int value) { return 0; }
int _cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}
int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}
int _cudaSetDevice(int device) { return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int _cudaDeviceSynchronize(void) { return 0; }
int _cudaStreamSynchronize(void *stream) { return 0; }

/* A compiled module loads its code once, before its first launch. */
typedef void (*raise_function)(const char *kind, const char **parts, int count);
int cuda_dialect_init_library_once(void **slot, int (*init)(void **), int (*to_device)(void **, int), void *raise) {
    void *library = NULL;
    int error;
    if (*slot)
        return 0;
    if ((error = init(&library)) || (error = to_device(&library, 0))) {
        ((void (*)(const char *, const char *))raise)("RuntimeError", "the virtual GPU is not connected");
        return error;
    }
    *slot = library;
    return 0;
}
int cuda_dialect_unload_library_once(void **library) { return 0; }
void cuda_dialect_assert_success(int result) {}
void cuda_dialect_print_on_error(int result) {}
const char *cuda_dialect_get_error_name(int result) { return result ? "virtual GPU error" : "success"; }
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_function raise, int result) {
    const char *parts[] = {"the virtual GPU refused a call"};
    if (raise)
        raise("RuntimeError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_function raise, int result) {
    CuteDSLRT_TVMFFISetRaisedCudaError(raise, result);
}
