// Asynchronous file I/O: what the two engines (aio_threads.cpp, aio_uring.cpp) share.
//
// A request is cut into pieces; an engine takes pieces, moves them, and reports each. The queues, the counting and the
// waiting are here; an engine only knows how to move a piece.
//
// Note [Reads before writes]
// Somebody waits for what is read; what is written back is waited for much later. So reads go first, in order of
// arrival, and so do writes among themselves. But a disk moves both ways at once, and memory is free again only when it
// has been written: while both wait, a quarter of the pieces in flight, rounded up, are writes. It is pieces in flight
// that are counted, so that slow writes do not fill an engine. One that moves a single piece at a time takes a write
// after three reads. A read that nobody waits for, such as that of a checkpoint, may be asked for with the writes.
#ifndef OFFLOAD_AIO_H
#define OFFLOAD_AIO_H

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "offload_native.h"

namespace offload {

constexpr std::uint64_t kDefaultPiece = std::uint64_t{4} << 20;
constexpr std::uint64_t kMaxCall = std::uint64_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB in one call

struct Request {
  bool write;
  bool behind;  // in the queue of the writes
  int fd;
  char* buffer;
  std::uint64_t nbytes;
  std::uint64_t offset;
  std::uint64_t max_call;

  // Under the engine's mutex:
  std::uint64_t handed_out = 0;  // bytes that are in some piece already
  int pieces = 0;                // handed out and not yet reported
  int waiters = 0;
  bool complete = false;
  offload_aio_completion result{};
};

struct Piece {
  Request* request = nullptr;
  std::uint64_t at = 0;   // next byte to move, from the start of the request
  std::uint64_t end = 0;  // one past the last
  int retries = 0;

  char* address() const { return request->buffer + at; }
  std::uint64_t file_offset() const { return request->offset + at; }
  std::uint64_t call_size() const;
};

// Takes the result of one system call (bytes, or a negative errno value) into account: the piece moves on. Returns
// kMore when another call is needed (for EINTR and EAGAIN after a short sleep, a bounded number of times), else the
// piece is over: 0 or a positive errno value.
constexpr int kMore = -1;
int advance(Piece& piece, std::int64_t result);

std::int64_t monotonic_ns();

// Starts a thread that receives no signals: they are for the program's own threads. Throws std::system_error.
std::thread start_quiet_thread(std::function<void()> body);

class AioEngine {
 public:
  explicit AioEngine(std::uint64_t piece_size) : piece_size_(piece_size) {}
  virtual ~AioEngine() = default;
  AioEngine(const AioEngine&) = delete;
  AioEngine& operator=(const AioEngine&) = delete;

  std::int32_t submit(const Request& request, std::int64_t* id);
  std::int32_t done(std::int64_t id);
  std::int32_t wait(std::int64_t id, std::int64_t timeout_ns, offload_aio_completion* result);
  void close();

  // See offload_aio_register().
  virtual std::int32_t register_buffers(std::int32_t count, void* const* addresses, const std::uint64_t* sizes);

 protected:
  // The next piece to move; false when there is none now.
  bool try_take(Piece* piece);
  // The same, but waits; false: there will be no more.
  bool take(Piece* piece);
  // A piece is over: moved as far as piece.at, with an errno value or 0.
  void report(const Piece& piece, int error);
  // Whether close() was called and every piece is taken.
  bool exhausted();

  virtual void wake() = 0;          // a request was queued, or close() was called; called without the mutex
  virtual void join_threads() = 0;  // called once, by close()

 private:
  bool idle_locked() const { return queues_[0].empty() && queues_[1].empty(); }
  bool write_is_next_locked() const;
  bool take_locked(Piece* piece);
  void finish_locked(Request& request);

  const std::uint64_t piece_size_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable work_;
  std::condition_variable completed_;
  std::unordered_map<std::int64_t, std::unique_ptr<Request>> requests_;
  // Requests with bytes not yet handed out, in order of arrival; at index true those behind.
  std::deque<Request*> queues_[2];
  int in_flight_[2] = {0, 0};  // pieces handed out and not yet reported, likewise
  int passed_over_ = 0;        // reads taken since the last write, while one waited
  std::int64_t next_id_ = 1;
  bool closing_ = false;
  std::mutex joining_;  // one close() at a time
  bool joined_ = false;
};

// Both throw std::system_error, with a text that says which step failed.
std::shared_ptr<AioEngine> open_threads(int workers, std::uint64_t piece_size);
std::shared_ptr<AioEngine> open_uring(int depth, std::uint64_t piece_size);

}  // namespace offload

#endif  // OFFLOAD_AIO_H
