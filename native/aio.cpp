#include "aio.h"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace offload {
namespace {

constexpr int kMaxRetries = 1000;  // with the sleeps below: a second or more

// A read that met the end of the file. Direct I/O says EINVAL when the rest would begin at an odd place there.
bool at_end_of_file(const Piece& piece) {
  struct stat info;
  return fstat(piece.request->fd, &info) == 0 && S_ISREG(info.st_mode) &&
         piece.file_offset() >= static_cast<std::uint64_t>(info.st_size);
}

}  // namespace

std::uint64_t Piece::call_size() const {
  return std::min(end - at, request->max_call);
}

int advance(Piece& piece, std::int64_t result) {
  if (result > 0) {
    piece.at += static_cast<std::uint64_t>(result);
    piece.retries = 0;
    return piece.at < piece.end ? kMore : 0;
  }
  if (result == 0) return EIO;  // a read beyond the end, or a device that takes nothing more
  const int error = static_cast<int>(-result);
  if (error == EINVAL && !piece.request->write && at_end_of_file(piece)) return EIO;
  if (error != EINTR && error != EAGAIN) return error;
  if (++piece.retries > kMaxRetries) return error;
  if (error == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return kMore;
}

std::int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

std::thread start_quiet_thread(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits the mask
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

std::int32_t AioEngine::submit(const Request& request, std::int64_t* id) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return -ESHUTDOWN;
    auto owned = std::make_unique<Request>(request);
    Request& queued = *owned;
    *id = next_id_;
    requests_.emplace(next_id_, std::move(owned));
    if (queued.nbytes == 0) {
      queued.result.start_ns = monotonic_ns();
      finish_locked(queued);
    } else {
      try {
        queues_[queued.behind].push_back(&queued);
      } catch (...) {
        requests_.erase(next_id_);
        throw;
      }
    }
    ++next_id_;
  }
  work_.notify_all();
  wake();
  return 0;
}

std::int32_t AioEngine::done(std::int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = requests_.find(id);
  if (found == requests_.end()) return -ENOENT;
  return found->second->complete ? 1 : 0;
}

std::int32_t AioEngine::wait(std::int64_t id, std::int64_t timeout_ns, offload_aio_completion* result) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = requests_.find(id);
  if (found == requests_.end()) return -ENOENT;
  Request& request = *found->second;
  const auto complete = [&request] { return request.complete; };
  ++request.waiters;
  if (timeout_ns < 0) {
    completed_.wait(lock, complete);
  } else {
    completed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), complete);
  }
  --request.waiters;
  if (!request.complete) return -ETIMEDOUT;
  *result = request.result;
  if (request.waiters == 0) requests_.erase(id);
  return 0;
}

void AioEngine::close() {
  const std::lock_guard<std::mutex> one_at_a_time(joining_);
  if (joined_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  wake();
  join_threads();
  joined_ = true;
}

std::int32_t AioEngine::register_buffers(std::int32_t, void* const*, const std::uint64_t*) {
  return -EOPNOTSUPP;
}

bool AioEngine::try_take(Piece* piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take_locked(piece);
}

bool AioEngine::take(Piece* piece) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait(lock, [this] { return !idle_locked() || closing_; });
  return take_locked(piece);
}

// See Note [Reads before writes].
bool AioEngine::write_is_next_locked() const {
  if (queues_[true].empty() || queues_[false].empty()) return queues_[false].empty();
  const int all = in_flight_[false] + in_flight_[true];
  return all > 0 ? 4 * in_flight_[true] < all + 1 : passed_over_ >= 3;
}

bool AioEngine::take_locked(Piece* piece) {
  if (idle_locked()) return false;
  const bool write = write_is_next_locked();
  passed_over_ = write || queues_[true].empty() ? 0 : passed_over_ + 1;
  std::deque<Request*>& queue = queues_[write];
  Request& request = *queue.front();
  if (request.handed_out == 0) request.result.start_ns = monotonic_ns();
  *piece = Piece{&request, request.handed_out, std::min(request.handed_out + piece_size_, request.nbytes), 0};
  request.handed_out = piece->end;
  ++request.pieces;
  ++in_flight_[write];
  if (request.handed_out == request.nbytes) queue.pop_front();
  return true;
}

void AioEngine::report(const Piece& piece, int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = *piece.request;
  --request.pieces;
  --in_flight_[request.behind];
  // Where the piece began: every piece but the last is of full size.
  const std::uint64_t begin = (piece.end - 1) / piece_size_ * piece_size_;
  request.result.nbytes += piece.at - begin;
  if (error != 0 && request.result.error == 0) {
    request.result.error = error;
    if (request.handed_out < request.nbytes) {  // nothing of it is begun any more
      request.handed_out = request.nbytes;
      std::deque<Request*>& queue = queues_[request.behind];
      queue.erase(std::find(queue.begin(), queue.end(), &request));
    }
  }
  if (request.pieces == 0 && request.handed_out == request.nbytes) finish_locked(request);
}

bool AioEngine::exhausted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closing_ && idle_locked();
}

void AioEngine::finish_locked(Request& request) {
  request.result.end_ns = monotonic_ns();
  request.complete = true;
  completed_.notify_all();
}

}  // namespace offload
