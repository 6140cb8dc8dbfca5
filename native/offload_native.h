// The native core's whole interface: plain C, no Python, no torch.
//
// Every function that can fail returns 0 or a negative errno value; offload_error_text() says it in words.
// No function throws, and none keeps a pointer after it returned, except offload_aio_submit(), which keeps the
// buffer until the request has completed.
#ifndef OFFLOAD_NATIVE_H
#define OFFLOAD_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define OFFLOAD_API __attribute__((visibility("default")))
#else
#define OFFLOAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or a signature below changes; the binding refuses any other number.
#define OFFLOAD_ABI 6
OFFLOAD_API int32_t offload_abi(void);

// A short English text for a code returned by a function below. Never NULL; the text is static or thread-local.
OFFLOAD_API const char* offload_error_text(int32_t code);

// ---- instruction sets -------------------------------------------------------------------------------------------

// How many of the compiled instruction sets this processor can run, and their names, fastest first
// ("avx512", "avx2", "baseline"; "neon"). A kernel takes the index. NULL for an index out of range.
OFFLOAD_API int32_t offload_isa_count(void);
OFFLOAD_API const char* offload_isa_name(int32_t index);

// ---- arithmetic -------------------------------------------------------------------------------------------------

enum { OFFLOAD_NONE = 0, OFFLOAD_F32 = 1, OFFLOAD_BF16 = 2, OFFLOAD_F16 = 3 };

// One update of Adam (decoupled = 0, L2 decay) or AdamW (decoupled = 1) over n elements. In this order, every
// operation rounded to fp32 on its own, so that all instruction sets give the same bits:
//
//   g = float(grad) * grad_scale
//   decoupled:      p = p * decay            (decay = 1 - lr * weight_decay)
//   not decoupled:  g = g + p * decay        (decay = weight_decay)
//   m = m * beta1 + g * one_minus_beta1
//   v = v * beta2 + (g * g) * one_minus_beta2
//   d = sqrt(v) * inv_sqrt_bias2 + eps
//   p = p - step_size * (m / d)
//
// param holds fp32 masters, or bf16/fp16 weights without a master. With fp32 masters, out (or NULL) receives the
// new weights rounded to nearest even. Buffers must not overlap.
//
// The moments are fp32, or bf16: then m and v are rounded stochastically as they are stored, after p has been computed
// from them. The random bits are a function of step and of the element's number first + i alone, see
// Note [Random bits by counting] in kernels.cpp.
typedef struct offload_adam_args {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* out;
  uint64_t n;
  uint64_t first;
  int32_t param_dtype;
  int32_t grad_dtype;
  int32_t out_dtype;
  int32_t moment_dtype;
  int32_t decoupled;
  uint32_t step;
  float grad_scale;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias2;
  float eps;
  float step_size;
} offload_adam_args;

// threads: how many threads may work on the call, the caller included (>= 1).
OFFLOAD_API int32_t offload_adam(const offload_adam_args* args, int32_t isa, int32_t threads);

// start and the sum of squares in double. The order of the additions depends on n alone. Not finite exactly when x is
// not. Where start is the sum of what comes before x, a multiple of 4096 elements, it is that of one call for all.
OFFLOAD_API int32_t offload_sum_squares(const void* x, int32_t dtype, uint64_t n, double start, int32_t isa,
                                        int32_t threads, double* result);

// target = source (add = 0) or target + source, each rounded to the target's dtype, source first; and as
// offload_sum_squares, start and the sum of squares of what target holds then. Buffers must not overlap.
OFFLOAD_API int32_t offload_accumulate(void* target, int32_t target_dtype, const void* source, int32_t source_dtype,
                                       uint64_t n, int32_t add, double start, int32_t isa, int32_t threads,
                                       double* result);

// Moves the memory that offload_adam moves (reads grad, param and both moments; writes param, both moments and out;
// 28 B per element for a bf16 grad and a bf16 out) and computes next to nothing: the limit for benchmarks.
// grad and out hold 16-bit values.
OFFLOAD_API int32_t offload_traffic(float* param, const uint16_t* grad, float* exp_avg, float* exp_avg_sq,
                                    uint16_t* out, uint64_t n, int32_t isa, int32_t threads);

// ---- checksums --------------------------------------------------------------------------------------------------

enum { OFFLOAD_CRC_SOFTWARE = 0, OFFLOAD_CRC_HARDWARE = 1 };

// Whether this processor has an instruction for CRC-32C that this library knows.
OFFLOAD_API int32_t offload_crc_hardware(void);

// CRC-32C (Castagnoli; RFC 3720, appendix B.4; 0xe3069283 for "123456789") of each granule of `granule` bytes of data,
// the last of which may be short: ceil(nbytes / granule) values into out. -ENOTSUP: the processor lacks `how`.
OFFLOAD_API int32_t offload_crc32c(const void* data, uint64_t nbytes, uint64_t granule, uint32_t* out, int32_t how,
                                   int32_t threads);

// ---- asynchronous file I/O --------------------------------------------------------------------------------------

enum { OFFLOAD_AIO_THREADS = 0, OFFLOAD_AIO_URING = 1 };

typedef struct offload_aio_completion {
  uint64_t nbytes;   // bytes moved
  int64_t start_ns;  // CLOCK_MONOTONIC when the first piece was started
  int64_t end_ns;    // CLOCK_MONOTONIC when the last piece ended
  int32_t error;     // 0 or an errno value; EIO with nbytes short of the request: a read met the end of the file
  int32_t reserved;
} offload_aio_completion;

// 0 when io_uring works here; else a negative errno value, with what failed in text (size bytes).
OFFLOAD_API int32_t offload_aio_probe_uring(char* text, size_t size);

// Opens an engine. workers: threads of OFFLOAD_AIO_THREADS. depth: pieces in flight of OFFLOAD_AIO_URING.
// piece: a request is moved in pieces of this many bytes (0: 4 MiB), several at a time; a multiple of 4096.
OFFLOAD_API int32_t offload_aio_open(int32_t backend, int32_t workers, int32_t depth, uint64_t piece, int64_t* engine);

// How a request moves: what neither writes nor is asked for behind the others is read before those.
enum { OFFLOAD_AIO_WRITE = 1, OFFLOAD_AIO_BEHIND = 2 };

// Queues one request and returns at once. how: OFFLOAD_AIO_WRITE, OFFLOAD_AIO_BEHIND or 0. Requests that read go before
// those that write or are to go behind, but while both wait, a quarter of the pieces in flight are of the latter; in
// one queue the order is that of arrival. No system call moves more than max_call bytes (0: 1 GiB, also the most).
OFFLOAD_API int32_t offload_aio_submit(int64_t engine, int32_t how, int32_t fd, void* buffer, uint64_t nbytes,
                                       uint64_t offset, uint64_t max_call, int64_t* id);

// 1 when request id has completed, 0 when not, -ENOENT when there is none.
OFFLOAD_API int32_t offload_aio_done(int64_t engine, int64_t id);

// Waits for request id, at most timeout_ns (negative: for ever), and forgets it. -ETIMEDOUT: it is still running.
// Several threads may wait for one request: all of them get the result.
OFFLOAD_API int32_t offload_aio_wait(int64_t engine, int64_t id, int64_t timeout_ns, offload_aio_completion* result);

// Tells io_uring of memory that many requests will use, so that the kernel need not look up its pages each time. Once
// in an engine's life, before or between requests. The memory must keep its pages (no MADV_DONTNEED) until the engine
// is freed. -EOPNOTSUPP: threads, or a kernel before 5.13; -ENOMEM: more than the limit on locked memory.
OFFLOAD_API int32_t offload_aio_register(int64_t engine, int32_t count, void* const* addresses, const uint64_t* sizes);

// Refuses new requests, finishes those queued and ends the threads; the results can still be waited for. A second call
// does nothing. A process made by fork() knows nothing of its parent's engines: -EBADF.
OFFLOAD_API int32_t offload_aio_close(int64_t engine);

// Closes the engine and frees it with all results nobody waited for.
OFFLOAD_API int32_t offload_aio_free(int64_t engine);

#ifdef __cplusplus
}
#endif

#endif  // OFFLOAD_NATIVE_H
