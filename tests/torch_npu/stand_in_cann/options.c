/* Settings of the runtime and of the operator compiler that torch_npu reads or writes
 * while it starts. Two libraries of CANN hold them, and torch_npu looks in both. */
#include <stdint.h>
#include <string.h>

int aclrtSetDeviceSatMode(int mode) { return 0; }
int aclrtGetDeviceSatMode(int *mode) {
  *mode = 1; /* infinities and NaNs as in IEEE 754 */
  return 0;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtGetSysParamOpt(int option, int64_t *value) {
  *value = 0;
  return 0;
}

int aclSetCompileopt(int option, const char *value) { return 0; }
int aclGetCompileopt(int option, char *value, size_t room) {
  strncpy(value, "disable", room);
  return 0;
}
size_t aclGetCompileoptSize(int option) { return 64; }

int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
  *value = 24; /* cores */
  return 0;
}

int aclrtSetOpWaitTimeout(uint32_t seconds) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return 0; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return 0; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t on) { return 0; }
