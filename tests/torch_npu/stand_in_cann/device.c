/* The part of Ascend's runtime that manages devices, memory, streams and events, on host
 * memory: enough for the real torch_npu to load and to do its own bookkeeping over it.
 * Everything is done when its call returns. Prototypes follow CANN's acl_rt.h; pointers
 * to types that only pass through are `void *`.
 *
 * STAND_IN_NPUS       how many devices the host has (2)
 * STAND_IN_NPU_BYTES  memory of each (1 GiB)
 * ASCEND_RT_VISIBLE_DEVICES  as for the real one: ids in ascending order
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  OK = 0,
  INVALID_DEVICE = 107001,
  NO_CONTEXT = 107002,
  OUT_OF_MEMORY = 207001,
  MAX_DEVICES = 16,
  ALIGNMENT = 512,
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes[MAX_DEVICES];
static int next_failure = OK;
static __thread int32_t current_device = -1;

static long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value ? strtol(value, NULL, 10) : otherwise;
}

static size_t total_bytes(void) {
  return (size_t)setting("STAND_IN_NPU_BYTES", 1L << 30);
}

static int32_t device_count(void) {
  const long installed = setting("STAND_IN_NPUS", 2);
  const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (visible == NULL) return (int32_t)installed;
  int32_t count = 0;
  long last = -1;
  while (*visible) {
    char *end;
    const long id = strtol(visible, &end, 10);
    if (end == visible || id <= last || id >= installed) return 0;
    last = id;
    ++count;
    visible = *end == ',' ? end + 1 : end;
  }
  return count;
}

static int32_t device_or_first(void) { return current_device < 0 ? 0 : current_device; }

/* For tests: the next synchronization answers with this error. */
void stand_in_fail_next(int code) {
  pthread_mutex_lock(&mutex);
  next_failure = code;
  pthread_mutex_unlock(&mutex);
}

static int synchronize(void) {
  pthread_mutex_lock(&mutex);
  const int failure = next_failure;
  next_failure = OK;
  pthread_mutex_unlock(&mutex);
  return failure;
}

/* --- devices ------------------------------------------------------------------------ */

int aclInit(const char *config) { return OK; }
int aclFinalize(void) { return OK; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "the stand-in has no detail"; }

int aclrtGetDeviceCount(uint32_t *count) {
  *count = (uint32_t)device_count();
  return OK;
}

int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  current_device = device;
  return OK;
}

int aclrtGetDevice(int32_t *device) {
  if (current_device < 0) return NO_CONTEXT;
  *device = current_device;
  return OK;
}

int aclrtResetDevice(int32_t device) { return OK; }

int aclrtGetCurrentContext(void **context) {
  if (current_device < 0) return NO_CONTEXT;
  *context = (void *)(intptr_t)(current_device + 1);
  return OK;
}

int aclrtSetCurrentContext(void *context) {
  current_device = (int32_t)(intptr_t)context - 1;
  return OK;
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  *flags = 0;
  *active = current_device == device;
  return OK;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  *can = 1;
  return OK;
}

int aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = getpid();
  return OK;
}

int aclrtGetDeviceUtilizationRate(int32_t device, int32_t *rates) {
  /* Cube cores, vector cores, AI CPUs, memory; in percent. */
  rates[0] = rates[1] = 7;
  rates[2] = rates[3] = 0;
  return OK;
}

/* --- memory: each block is preceded by a header, one alignment below it --------------- */

struct header {
  size_t bytes;
  int32_t device;
};

static struct header *header_of(void *block) {
  return (struct header *)((char *)block - ALIGNMENT);
}

int aclrtMalloc(void **block, size_t bytes, int policy) {
  const int32_t device = device_or_first();
  pthread_mutex_lock(&mutex);
  const int fits = used_bytes[device] + bytes <= total_bytes();
  if (fits) used_bytes[device] += bytes;
  pthread_mutex_unlock(&mutex);
  if (!fits) return OUT_OF_MEMORY;
  void *start = NULL;
  /* One alignment for the header, one because the device reads in whole lines. */
  if (posix_memalign(&start, ALIGNMENT, bytes + 2 * ALIGNMENT) != 0) return OUT_OF_MEMORY;
  *block = (char *)start + ALIGNMENT;
  *header_of(*block) = (struct header){.bytes = bytes, .device = device};
  return OK;
}

int aclrtMallocAlign32(void **block, size_t bytes, int policy) {
  return aclrtMalloc(block, bytes, policy);
}

int aclrtFree(void *block) {
  struct header *header = header_of(block);
  pthread_mutex_lock(&mutex);
  used_bytes[header->device] -= header->bytes;
  pthread_mutex_unlock(&mutex);
  free(header);
  return OK;
}

int aclrtMallocHost(void **block, size_t bytes) {
  return posix_memalign(block, 64, bytes ? bytes : 64) == 0 ? OK : OUT_OF_MEMORY;
}

int aclrtFreeHost(void *block) {
  free(block);
  return OK;
}

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  pthread_mutex_lock(&mutex);
  *total = total_bytes();
  *free_bytes = *total - used_bytes[device_or_first()];
  pthread_mutex_unlock(&mutex);
  return OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
  memcpy(to, from, bytes);
  return OK;
}

int aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
  return aclrtMemcpy(to, room, from, bytes, kind);
}

int aclrtMemset(void *block, size_t room, int32_t value, size_t bytes) {
  memset(block, value, bytes);
  return OK;
}

int aclrtMemsetAsync(void *block, size_t room, int32_t value, size_t bytes, void *stream) {
  return aclrtMemset(block, room, value, bytes);
}

/* --- streams and events: identities only ---------------------------------------------- */

static int new_identity(void **identity) {
  *identity = malloc(1);
  return *identity ? OK : OUT_OF_MEMORY;
}

int aclrtCreateStream(void **stream) { return new_identity(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
  return new_identity(stream);
}
int aclrtDestroyStream(void *stream) {
  free(stream);
  return OK;
}
int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }
int aclrtStreamQuery(void *stream, int *status) {
  *status = 0; /* complete */
  return OK;
}
int aclrtSynchronizeStream(void *stream) { return synchronize(); }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) {
  return synchronize();
}
int aclrtSynchronizeDevice(void) { return synchronize(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return synchronize(); }

int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return new_identity(event); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return new_identity(event); }
int aclrtDestroyEvent(void *event) {
  free(event);
  return OK;
}
int aclrtRecordEvent(void *event, void *stream) { return OK; }
int aclrtStreamWaitEvent(void *stream, void *event) { return OK; }
int aclrtSynchronizeEvent(void *event) { return OK; }
int aclrtQueryEventStatus(void *event, int *status) {
  *status = 1; /* recorded */
  return OK;
}
int aclrtQueryEventWaitStatus(void *event, int *status) {
  *status = 0; /* nobody waits */
  return OK;
}
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = 0;
  return OK;
}
