// io_uring by raw system calls: one thread owns the ring, fills it and reaps it, so the ring needs no lock.
#include "aio.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#include <cerrno>
#include <system_error>

// The header of Linux 5.7 or later: it has the operations used here.
#if defined(IORING_FEAT_FAST_POLL)

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

namespace offload {
namespace {

[[noreturn]] void fail(int error, const char* step) {
  throw std::system_error(error, std::generic_category(), step);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

class Mapping {
 public:
  Mapping(int fd, std::size_t size, std::uint64_t offset)
      : size_(size),
        address_(
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset))) {
    if (address_ == MAP_FAILED) fail(errno, "mapping the io_uring");
  }
  ~Mapping() { munmap(address_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  template <class T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(address_) + offset);
  }

 private:
  const std::size_t size_;
  void* const address_;
};

// The two queues shared with the kernel. Used by one thread.
class Ring {
 public:
  explicit Ring(unsigned entries)
      : fd_(setup(entries, &params_)),
        submissions_(fd_.get(), params_.sq_off.array + params_.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING),
        completions_(fd_.get(), params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
        entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        sq_head_(submissions_.at<unsigned>(params_.sq_off.head)),
        sq_tail_(submissions_.at<unsigned>(params_.sq_off.tail)),
        cq_head_(completions_.at<unsigned>(params_.cq_off.head)),
        cq_tail_(completions_.at<unsigned>(params_.cq_off.tail)),
        tail_(*sq_tail_) {
    for (unsigned i = 0; i < params_.sq_entries; ++i) submissions_.at<unsigned>(params_.sq_off.array)[i] = i;
    require_operations();
  }

  // 0 or a negative errno value. Since Linux 5.13 it waits for no request under way, which our poll would never end.
  std::int32_t register_buffers(const std::vector<iovec>& buffers) {
#if defined(IORING_FEAT_RSRC_TAGS)
    if ((params_.features & IORING_FEAT_RSRC_TAGS) == 0) return -EOPNOTSUPP;
    const long done = syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_BUFFERS, buffers.data(),
                              static_cast<unsigned>(buffers.size()));
    return done < 0 ? -errno : 0;
#else
    (void)buffers;
    return -EOPNOTSUPP;
#endif
  }

  // An empty entry at the end of the submission queue; the caller never asks for more than fit.
  io_uring_sqe* push() {
    io_uring_sqe* entry = entries_.at<io_uring_sqe>(0) + (tail_ & (params_.sq_entries - 1));
    std::memset(entry, 0, sizeof *entry);
    ++tail_;
    return entry;
  }

  unsigned unsubmitted() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }

  // Takes back the last entry that the kernel has not seen and returns what it was for.
  std::uint64_t pop_unsubmitted() {
    return (entries_.at<io_uring_sqe>(0) + (--tail_ & (params_.sq_entries - 1)))->user_data;
  }

  // Gives the kernel what was pushed and waits for one completion. 0 or an errno value.
  int enter() {
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    const long done =
        syscall(__NR_io_uring_enter, fd_.get(), unsubmitted(), 1U, IORING_ENTER_GETEVENTS, nullptr, std::size_t{0});
    return done < 0 ? errno : 0;
  }

  bool reap(io_uring_cqe* completion) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    *completion = completions_.at<io_uring_cqe>(params_.cq_off.cqes)[head & (params_.cq_entries - 1)];
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  static int setup(unsigned entries, io_uring_params* params) {
    const long fd = syscall(__NR_io_uring_setup, entries, params);
    if (fd < 0) fail(errno, "io_uring_setup");
    return static_cast<int>(fd);
  }

  void require_operations() {
    constexpr unsigned kCount = IORING_OP_WRITE + 1;
    alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + kCount * sizeof(io_uring_probe_op)] = {};
    auto* probe = reinterpret_cast<io_uring_probe*>(memory);
    if (syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_PROBE, probe, kCount) < 0) {
      fail(errno, "asking io_uring for its operations (Linux 5.6 or later is needed)");
    }
    for (const unsigned needed : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD}) {
      if (needed > probe->last_op || !(probe->ops[needed].flags & IO_URING_OP_SUPPORTED)) {
        fail(EOPNOTSUPP, "io_uring lacks an operation (Linux 5.6 or later is needed)");
      }
    }
  }

  io_uring_params params_{};
  const FileDescriptor fd_;
  const Mapping submissions_;
  const Mapping completions_;
  const Mapping entries_;
  unsigned* const sq_head_;
  unsigned* const sq_tail_;
  unsigned* const cq_head_;
  unsigned* const cq_tail_;
  unsigned tail_;
};

class UringEngine final : public AioEngine {
 public:
  UringEngine(int depth, std::uint64_t piece_size)
      : AioEngine(piece_size),
        ring_(static_cast<unsigned>(depth) + 1),
        bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        slots_(static_cast<std::size_t>(depth)) {
    if (bell_.get() < 0) fail(errno, "eventfd");
    for (std::size_t i = 0; i < slots_.size(); ++i) free_slots_.push_back(i);
    thread_ = start_quiet_thread([this] { serve(); });
  }
  ~UringEngine() override { close(); }

  std::int32_t register_buffers(std::int32_t count, void* const* addresses, const std::uint64_t* sizes) override {
    const std::lock_guard<std::mutex> once(registering_);
    if (registered_.load(std::memory_order_relaxed)) return -EALREADY;
    std::vector<iovec> buffers;
    for (std::int32_t i = 0; i < count; ++i) buffers.push_back({addresses[i], static_cast<std::size_t>(sizes[i])});
    const std::int32_t code = ring_.register_buffers(buffers);
    if (code != 0) return code;
    buffers_ = std::move(buffers);
    registered_.store(true, std::memory_order_release);
    return 0;
  }

 private:
  static constexpr std::uint64_t kBell = ~std::uint64_t{0};  // user_data of the poll for bell_
  static constexpr int kMaxStalls = 5000;                    // of a millisecond each

  void serve() {
    listen();
    int stalls = 0;
    for (;;) {
      Piece piece;
      while (!free_slots_.empty() && try_take(&piece)) {
        const std::size_t slot = free_slots_.back();
        free_slots_.pop_back();
        slots_[slot] = piece;
        push(slot);
      }
      if (free_slots_.size() == slots_.size() && exhausted()) return;
      const int error = ring_.enter();
      if (reap() > 0 || error == 0 || error == EINTR) {
        stalls = 0;
      } else if (++stalls < kMaxStalls) {  // EAGAIN, EBUSY: the kernel has no memory or no room just now
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else {
        give_up_unsubmitted(error);
        stalls = 0;
      }
    }
  }

  void listen() {
    io_uring_sqe* entry = ring_.push();
    entry->opcode = IORING_OP_POLL_ADD;
    entry->fd = bell_.get();
    entry->poll_events = POLLIN;
    entry->user_data = kBell;
  }

  void push(std::size_t slot) {
    const Piece& piece = slots_[slot];
    io_uring_sqe* entry = ring_.push();
    entry->opcode = piece.request->write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = piece.request->fd;
    entry->addr = reinterpret_cast<std::uintptr_t>(piece.address());
    entry->len = static_cast<std::uint32_t>(piece.call_size());
    entry->off = piece.file_offset();
    entry->user_data = slot;
    if (const int index = registered_at(piece); index >= 0) {
      entry->opcode = piece.request->write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
      entry->buf_index = static_cast<std::uint16_t>(index);
    }
  }

  // The registered buffer that holds the piece, or -1. There are few of them.
  int registered_at(const Piece& piece) const {
    if (!registered_.load(std::memory_order_acquire)) return -1;
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const char* const begin = static_cast<const char*>(buffers_[i].iov_base);
      if (piece.address() >= begin && piece.address() + piece.call_size() <= begin + buffers_[i].iov_len) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  int reap() {
    int count = 0;
    io_uring_cqe completion;
    for (; ring_.reap(&completion); ++count) {
      if (completion.user_data == kBell) {
        std::uint64_t rings;
        while (read(bell_.get(), &rings, sizeof rings) < 0 && errno == EINTR) continue;
        listen();
        continue;
      }
      const std::size_t slot = completion.user_data;
      const int outcome = advance(slots_[slot], completion.res);
      if (outcome == kMore) {
        push(slot);
      } else {
        finish(slot, outcome);
      }
    }
    return count;
  }

  void finish(std::size_t slot, int error) {
    report(slots_[slot], error);
    free_slots_.push_back(slot);
  }

  // The kernel has refused for seconds: what it has not got ends with that error. What it has got goes on.
  void give_up_unsubmitted(int error) {
    bool bell_lost = false;
    while (ring_.unsubmitted() > 0) {
      const std::uint64_t user_data = ring_.pop_unsubmitted();
      if (user_data == kBell) {
        bell_lost = true;
      } else {
        finish(user_data, error);
      }
    }
    if (bell_lost) listen();
  }

  void wake() override {
    const std::uint64_t one = 1;
    // EAGAIN: the counter is full, so the bell rings already.
    while (write(bell_.get(), &one, sizeof one) < 0 && errno == EINTR) continue;
  }
  void join_threads() override {
    if (thread_.joinable()) thread_.join();
  }

  Ring ring_;
  const FileDescriptor bell_;  // an eventfd: wakes the thread from its wait for completions
  std::vector<Piece> slots_;
  std::vector<std::size_t> free_slots_;
  std::mutex registering_;
  std::atomic<bool> registered_{false};
  std::vector<iovec> buffers_;  // does not change once registered_ is true
  std::thread thread_;
};

}  // namespace

std::shared_ptr<AioEngine> open_uring(int depth, std::uint64_t piece_size) {
  return std::make_shared<UringEngine>(depth, piece_size);
}

}  // namespace offload

#else

namespace offload {

std::shared_ptr<AioEngine> open_uring(int, std::uint64_t) {
  throw std::system_error(ENOSYS, std::generic_category(), "offload was built where there is no io_uring");
}

}  // namespace offload

#endif
