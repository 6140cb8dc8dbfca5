// The plain engine: threads that call pread and pwrite.
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "aio.h"

namespace offload {
namespace {

class ThreadsEngine final : public AioEngine {
 public:
  ThreadsEngine(int workers, std::uint64_t piece_size) : AioEngine(piece_size) {
    try {
      for (int i = 0; i < workers; ++i) threads_.push_back(start_quiet_thread([this] { serve(); }));
    } catch (...) {
      close();
      throw;
    }
  }
  ~ThreadsEngine() override { close(); }

 private:
  void serve() {
    Piece piece;
    while (take(&piece)) {
      int outcome;
      do {
        outcome = advance(piece, move(piece));
      } while (outcome == kMore);
      report(piece, outcome);
    }
  }

  static std::int64_t move(const Piece& piece) {
    const auto offset = static_cast<off_t>(piece.file_offset());
    const ssize_t moved = piece.request->write ? pwrite(piece.request->fd, piece.address(), piece.call_size(), offset)
                                               : pread(piece.request->fd, piece.address(), piece.call_size(), offset);
    return moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
  }

  void wake() override {}  // take() waits on the engine's own condition
  void join_threads() override {
    for (std::thread& thread : threads_) thread.join();
  }

  std::vector<std::thread> threads_;
};

}  // namespace

std::shared_ptr<AioEngine> open_threads(int workers, std::uint64_t piece_size) {
  return std::make_shared<ThreadsEngine>(workers, piece_size);
}

}  // namespace offload
