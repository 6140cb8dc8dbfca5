// The I/O half of offload_native.h: handles, checks, and errors as codes.
#include <pthread.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <system_error>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "aio.h"

namespace {

using offload::AioEngine;

// Engines by handle, so that a handle that was freed, or that a parent process opened, is an error and not a crash.
// A child of fork() has none of the threads of its parent's engines: it forgets them, and what they hold stays.
struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<AioEngine>> engines;
  int64_t next = 1;
};

Registry* registry_of_process = nullptr;

Registry& registry() {
  static const bool made = [] {
    registry_of_process = new Registry;  // never destroyed: threads may use it until the process ends
    pthread_atfork([] { registry_of_process->mutex.lock(); }, [] { registry_of_process->mutex.unlock(); },
                   [] {
                     auto* fresh = new Registry;
                     fresh->next = registry_of_process->next;  // an inherited handle never becomes valid again
                     registry_of_process = fresh;
                   });
    return true;
  }();
  (void)made;
  return *registry_of_process;
}

std::shared_ptr<AioEngine> find(int64_t handle) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.engines.find(handle);
  return found == all.engines.end() ? nullptr : found->second;
}

template <class Body>
int32_t guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  } catch (const std::system_error& error) {
    return error.code().value() > 0 ? -error.code().value() : -EIO;
  }
}

template <class Body>
int32_t with_engine(int64_t handle, Body body) {
  return guarded([&]() -> int32_t {
    const std::shared_ptr<AioEngine> engine = find(handle);
    return engine == nullptr ? -EBADF : body(*engine);
  });
}

std::shared_ptr<AioEngine> open_engine(int32_t backend, int32_t workers, int32_t depth, uint64_t piece) {
  return backend == OFFLOAD_AIO_URING ? offload::open_uring(depth, piece) : offload::open_threads(workers, piece);
}

#if defined(__linux__)
// Writes a page to a file in memory through the ring and reads it back.
int32_t try_uring(char* text, std::size_t size) {
  constexpr std::size_t kPage = 4096;
  const std::shared_ptr<AioEngine> engine = offload::open_uring(2, offload::kDefaultPiece);
  auto pages = std::make_unique<char[]>(2 * kPage);  // zeros
  std::memset(pages.get(), 0x5a, kPage);
  const int fd = memfd_create("offload-probe", MFD_CLOEXEC);
  if (fd < 0) return 0;  // nothing to try it on
  int32_t code = 0;
  for (const bool write : {true, false}) {
    offload::Request request{};
    request.write = request.behind = write;
    request.fd = fd;
    request.buffer = pages.get() + (write ? 0 : kPage);
    request.nbytes = kPage;
    request.max_call = offload::kMaxCall;
    int64_t id = 0;
    offload_aio_completion result{};
    code = engine->submit(request, &id);
    if (code == 0) code = engine->wait(id, int64_t{5} * 1000000000, &result);
    if (code == -ETIMEDOUT) {
      // Closing the engine would wait as well, and the kernel may still write: leave it all to the end of the process.
      new std::shared_ptr<AioEngine>(engine);
      pages.release();
      std::snprintf(text, size, "io_uring took a request and did not answer within 5 s");
      return code;
    }
    if (code == 0) code = -result.error;
    if (code != 0) {
      std::snprintf(text, size, "io_uring could not %s: %s", write ? "write" : "read", offload_error_text(code));
      break;
    }
  }
  if (code == 0 && std::memcmp(pages.get(), pages.get() + kPage, kPage) != 0) {
    std::snprintf(text, size, "io_uring read back other bytes than it wrote");
    code = -EIO;
  }
  engine->close();
  ::close(fd);
  return code;
}
#endif

}  // namespace

extern "C" {

int32_t offload_aio_probe_uring(char* text, size_t size) {
  if (text == nullptr || size == 0) return -EINVAL;
  text[0] = '\0';
  try {
#if defined(__linux__)
    return try_uring(text, size);
#else
    std::snprintf(text, size, "io_uring is a part of Linux only");
    return -ENOSYS;
#endif
  } catch (const std::bad_alloc&) {
    std::snprintf(text, size, "out of memory");
    return -ENOMEM;
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    const char* hint = code == EPERM
                           ? "; the sysctl kernel.io_uring_disabled or a container's seccomp filter forbids it"
                       : code == ENOMEM ? "; the limit on locked memory (ulimit -l) may be too small"
                                        : "";
    std::snprintf(text, size, "%s%s", error.what(), hint);
    return code > 0 ? -code : -EIO;
  }
}

int32_t offload_aio_open(int32_t backend, int32_t workers, int32_t depth, uint64_t piece, int64_t* engine) {
  if (backend != OFFLOAD_AIO_THREADS && backend != OFFLOAD_AIO_URING) return -EINVAL;
  if (piece == 0) piece = offload::kDefaultPiece;
  if (engine == nullptr || workers < 1 || workers > 256 || depth < 1 || depth > 4095) return -EINVAL;
  if (piece % 4096 != 0 || piece > offload::kMaxCall) return -EINVAL;
  return guarded([&]() -> int32_t {
    std::shared_ptr<AioEngine> opened = open_engine(backend, workers, depth, piece);
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.engines.emplace(all.next, std::move(opened));
    *engine = all.next++;
    return 0;
  });
}

int32_t offload_aio_submit(int64_t engine, int32_t how, int32_t fd, void* buffer, uint64_t nbytes, uint64_t offset,
                           uint64_t max_call, int64_t* id) {
  if (id == nullptr || (buffer == nullptr && nbytes > 0)) return -EINVAL;
  if ((how & ~(OFFLOAD_AIO_WRITE | OFFLOAD_AIO_BEHIND)) != 0) return -EINVAL;
  constexpr uint64_t kLargest = INT64_MAX;
  if (offset > kLargest || nbytes > kLargest - offset) return -EOVERFLOW;
  offload::Request request{};
  request.write = (how & OFFLOAD_AIO_WRITE) != 0;
  request.behind = how != 0;
  request.fd = fd;
  request.buffer = static_cast<char*>(buffer);
  request.nbytes = nbytes;
  request.offset = offset;
  request.max_call = max_call == 0 || max_call > offload::kMaxCall ? offload::kMaxCall : max_call;
  return with_engine(engine, [&](AioEngine& found) { return found.submit(request, id); });
}

int32_t offload_aio_done(int64_t engine, int64_t id) {
  return with_engine(engine, [&](AioEngine& found) { return found.done(id); });
}

int32_t offload_aio_wait(int64_t engine, int64_t id, int64_t timeout_ns, offload_aio_completion* result) {
  if (result == nullptr) return -EINVAL;
  return with_engine(engine, [&](AioEngine& found) { return found.wait(id, timeout_ns, result); });
}

int32_t offload_aio_register(int64_t engine, int32_t count, void* const* addresses, const uint64_t* sizes) {
  if (count < 1 || count > 1024 || addresses == nullptr || sizes == nullptr) return -EINVAL;
  return with_engine(engine, [&](AioEngine& found) { return found.register_buffers(count, addresses, sizes); });
}

int32_t offload_aio_close(int64_t engine) {
  return with_engine(engine, [](AioEngine& found) -> int32_t {
    found.close();
    return 0;
  });
}

int32_t offload_aio_free(int64_t engine) {
  return guarded([&]() -> int32_t {
    std::shared_ptr<AioEngine> last;
    {
      Registry& all = registry();
      const std::lock_guard<std::mutex> lock(all.mutex);
      const auto found = all.engines.find(engine);
      if (found == all.engines.end()) return -EBADF;
      last = std::move(found->second);
      all.engines.erase(found);
    }
    last->close();
    return 0;
  });
}

}  // extern "C"
