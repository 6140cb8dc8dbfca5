// Both I/O engines through the C interface, under sanitizers.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "aio.h"
#include "check.h"
#include "offload_native.h"

namespace {

std::int32_t backend;  // of the round that main() is in

struct Engine {
  explicit Engine(std::int32_t workers = 3, std::int32_t depth = 4, std::uint64_t piece = 64 << 10) {
    CHECK_EQUAL(offload_aio_open(backend, workers, depth, piece, &handle), 0);
  }
  ~Engine() { offload_aio_free(handle); }
  std::int64_t submit(bool write, int fd, std::vector<char>& buffer, std::uint64_t offset, std::uint64_t max_call = 0) {
    std::int64_t id = 0;
    CHECK_EQUAL(offload_aio_submit(handle, write, fd, buffer.data(), buffer.size(), offset, max_call, &id), 0);
    return id;
  }
  offload_aio_completion wait(std::int64_t id) {
    offload_aio_completion result{};
    CHECK_EQUAL(offload_aio_wait(handle, id, -1, &result), 0);
    return result;
  }
  std::int64_t handle = 0;
};

struct File {
  File() {
    char name[] = "/tmp/offload-test-XXXXXX";
    fd = mkstemp(name);
    CHECK(fd >= 0);
    unlink(name);
  }
  ~File() { close(fd); }
  int fd;
};

std::vector<char> noise(std::size_t n, unsigned seed) {
  std::vector<char> bytes(n);
  std::uint32_t state = seed * 2654435761u + 1;
  for (char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

void what_was_written_is_read_back() {
  Engine engine;
  File file;
  for (const std::size_t n : {0, 1, 4095, 65536, 65537, 1000003}) {
    for (const std::uint64_t max_call : {0, 10007}) {
      auto data = noise(n, 1);
      std::vector<char> back(n);
      const auto wrote = engine.wait(engine.submit(true, file.fd, data, 5, max_call));
      const auto read = engine.wait(engine.submit(false, file.fd, back, 5, max_call));
      CHECK_EQUAL(wrote.error, 0);
      CHECK_EQUAL(read.error, 0);
      CHECK_EQUAL(wrote.nbytes, n);
      CHECK_EQUAL(read.nbytes, n);
      CHECK(wrote.start_ns <= wrote.end_ns && wrote.end_ns <= read.start_ns && read.start_ns <= read.end_ns);
      CHECK(data == back);
    }
  }
}

void errors_end_a_request_and_nothing_else() {
  Engine engine;
  File file;
  auto data = noise(300000, 2);
  CHECK_EQUAL(engine.wait(engine.submit(true, file.fd, data, 0)).error, 0);
  std::vector<char> more(1000000);
  const auto end = engine.wait(engine.submit(false, file.fd, more, 0));
  CHECK_EQUAL(end.error, EIO);
  CHECK_EQUAL(end.nbytes, 300000);
  CHECK_EQUAL(engine.wait(engine.submit(true, -1, data, 0)).error, EBADF);
  const int full = open("/dev/full", O_WRONLY);
  CHECK_EQUAL(engine.wait(engine.submit(true, full, data, 0)).error, ENOSPC);
  close(full);
  std::vector<char> back(300000);
  CHECK_EQUAL(engine.wait(engine.submit(false, file.fd, back, 0)).error, 0);
  CHECK(data == back);
}

void many_threads_submit_and_wait() {
  Engine engine;
  File file;
  std::vector<std::thread> threads;
  for (unsigned which = 0; which < 4; ++which) {
    threads.emplace_back([&engine, &file, which] {
      for (unsigned round = 0; round < 12; ++round) {
        const std::size_t n = 1 + (which * 7919 + round * 104729) % 400000;
        const std::uint64_t offset = (std::uint64_t{which} * 12 + round) * 400000;
        auto data = noise(n, round);
        std::vector<char> back(n);
        const auto id = engine.submit(true, file.fd, data, offset);
        while (round % 3 == 0 && offload_aio_done(engine.handle, id) == 0) std::this_thread::yield();
        CHECK_EQUAL(engine.wait(id).error, 0);
        CHECK_EQUAL(engine.wait(engine.submit(false, file.fd, back, offset)).nbytes, n);
        CHECK(data == back);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void several_threads_wait_for_one() {
  Engine engine;
  File file;
  auto data = noise(8 << 20, 3);
  const auto id = engine.submit(true, file.fd, data, 0);
  std::atomic<int> got{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      offload_aio_completion result{};
      const std::int32_t code = offload_aio_wait(engine.handle, id, -1, &result);
      CHECK(code == -ENOENT || (code == 0 && result.nbytes == data.size()));
      if (code == 0) ++got;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(got >= 1);
}

void close_drains() {
  File file;
  auto data = noise(3000000, 4);
  Engine engine(1, 1);
  std::vector<std::int64_t> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(engine.submit(true, file.fd, data, std::uint64_t(i) * data.size()));
  std::thread closer([&engine] { CHECK_EQUAL(offload_aio_close(engine.handle), 0); });
  CHECK_EQUAL(offload_aio_close(engine.handle), 0);
  closer.join();
  std::int64_t id = 0;
  CHECK_EQUAL(offload_aio_submit(engine.handle, 1, file.fd, data.data(), 1, 0, 0, &id), -ESHUTDOWN);
  for (const std::int64_t one : ids) {
    CHECK_EQUAL(offload_aio_done(engine.handle, one), 1);
    CHECK_EQUAL(engine.wait(one).nbytes, data.size());
    offload_aio_completion result{};
    CHECK_EQUAL(offload_aio_wait(engine.handle, one, 0, &result), -ENOENT);
  }
  // Freed with results nobody asked for, and while another thread waits.
  Engine other(1, 1);
  const auto waited_for = other.submit(true, file.fd, data, 0);
  other.submit(true, file.fd, data, 0);
  std::thread waiter([&] {
    offload_aio_completion result{};
    const std::int32_t code = offload_aio_wait(other.handle, waited_for, -1, &result);
    CHECK(code == 0 || code == -EBADF);
  });
  CHECK_EQUAL(offload_aio_free(other.handle), 0);
  waiter.join();
  CHECK_EQUAL(offload_aio_free(other.handle), -EBADF);
  CHECK_EQUAL(offload_aio_done(other.handle, waited_for), -EBADF);
}

void waiting_has_an_end() {
  if (backend != OFFLOAD_AIO_URING) return;  // pread refuses a pipe at once
  Engine engine;
  int ends[2];
  CHECK_EQUAL(pipe(ends), 0);
  std::vector<char> byte(1);
  const auto id = engine.submit(false, ends[0], byte, 0);
  offload_aio_completion result{};
  CHECK_EQUAL(offload_aio_wait(engine.handle, id, 50000000, &result), -ETIMEDOUT);
  CHECK_EQUAL(offload_aio_done(engine.handle, id), 0);
  CHECK_EQUAL(write(ends[1], "x", 1), 1);
  CHECK_EQUAL(engine.wait(id).error, 0);
  CHECK_EQUAL(byte[0], 'x');
  close(ends[0]);
  close(ends[1]);
}

void a_forked_child_has_no_engines() {
#if !defined(OFFLOAD_TSAN)
  Engine engine;
  File file;
  auto data = noise(100000, 5);
  CHECK_EQUAL(engine.wait(engine.submit(true, file.fd, data, 0)).error, 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    std::int64_t id = 0;
    CHECK_EQUAL(offload_aio_submit(engine.handle, 1, file.fd, data.data(), 1, 0, 0, &id), -EBADF);
    CHECK_EQUAL(offload_aio_close(engine.handle), -EBADF);
    Engine own;
    CHECK(own.handle != engine.handle);
    std::vector<char> back(data.size());
    CHECK_EQUAL(own.wait(own.submit(false, file.fd, back, 0)).error, 0);
    CHECK(data == back);
    offload_aio_free(own.handle);
    _exit(0);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

// An engine that hands its pieces to the test instead of moving them.
class Hands final : public offload::AioEngine {
 public:
  Hands() : AioEngine(4096) {}
  ~Hands() override { close(); }

  std::int64_t queue(bool write, std::uint64_t pieces, bool behind = false) {
    offload::Request request{};
    request.write = write;
    request.behind = write || behind;
    request.nbytes = 4096 * pieces;
    std::int64_t id = 0;
    CHECK_EQUAL(submit(request, &id), 0);
    return id;
  }
  // Takes pieces until `depth` are in flight; which way each goes, as letters.
  std::string fill(std::size_t depth) {
    std::string taken;
    offload::Piece piece;
    while (in_flight_.size() < depth && try_take(&piece)) {
      in_flight_.push_back(piece);
      taken += piece.request->write ? 'w' : 'r';
    }
    return taken;
  }
  // The first piece in flight that goes this way is over.
  void end(bool write, int error = 0) {
    for (auto at = in_flight_.begin(); at != in_flight_.end(); ++at) {
      if (at->request->write != write) continue;
      offload::Piece piece = *at;
      in_flight_.erase(at);
      if (error == 0) piece.at = piece.end;
      report(piece, error);
      return;
    }
    CHECK(!"there is one");
  }
  std::string flying() const {
    std::string letters;
    for (const offload::Piece& piece : in_flight_) letters += piece.request->write ? 'w' : 'r';
    return letters;
  }

 private:
  void wake() override {}
  void join_threads() override {}
  std::vector<offload::Piece> in_flight_;
};

void reads_go_first_and_writes_go_on() {
  {
    Hands one;  // piece at a time
    one.queue(true, 3);
    CHECK(one.fill(1) == "w");  // nothing else waits
    one.queue(false, 8);
    std::string order;
    while (one.flying() != "") {
      one.end(one.flying() == "w");
      order += one.fill(1);
    }
    CHECK(order == "rrrwrrrwrr");
  }
  for (const std::size_t depth : {2, 3, 4, 5, 8, 32}) {
    Hands many;
    many.queue(true, 1000);
    many.queue(false, 1000);
    CHECK_EQUAL(many.fill(depth)[0], 'r');
    const std::size_t writes = (depth + 3) / 4;
    for (int round = 0; round < 300; ++round) {  // whichever way ends first, and however often
      const std::string flying = many.flying();
      CHECK_EQUAL(static_cast<std::size_t>(std::count(flying.begin(), flying.end(), 'w')), writes);
      many.end(round % 7 < 3);
      CHECK_EQUAL(many.fill(depth).size(), 1u);
    }
  }
  {
    Hands many;  // all of it writes; then somebody reads
    many.queue(true, 100);
    CHECK(many.fill(4) == "wwww");
    const std::int64_t read = many.queue(false, 2);
    many.end(true);
    CHECK(many.fill(4) == "r");
    many.end(true);
    CHECK(many.fill(4) == "r");
    many.end(true);
    CHECK(many.fill(4) == "w");  // no read is left, so nothing is held back
    CHECK_EQUAL(many.done(read), 0);
    many.end(false);
    many.end(false);
    CHECK_EQUAL(many.done(read), 1);
    many.end(true, EIO);  // the rest of that request is not begun
    CHECK_EQUAL(many.fill(4).size(), 0u);
    CHECK(many.flying() == "w");
    many.end(true);
  }
  {
    Hands one;  // a read that may wait goes with the writes, in the order of arrival
    const std::int64_t late = one.queue(false, 1, true);
    one.queue(true, 1);
    one.queue(false, 2);
    CHECK(one.fill(3) == "rrr");
    CHECK_EQUAL(one.done(late), 0);
    CHECK(one.fill(4) == "w");
    while (one.flying() != "") one.end(one.flying() == "w");
    CHECK_EQUAL(one.done(late), 1);
  }
}

void wrong_arguments_are_refused() {
  std::int64_t handle = 0, id = 0;
  CHECK_EQUAL(offload_aio_open(7, 1, 1, 0, &handle), -EINVAL);
  CHECK_EQUAL(offload_aio_open(backend, 0, 1, 0, &handle), -EINVAL);
  CHECK_EQUAL(offload_aio_open(backend, 1, 0, 0, &handle), -EINVAL);
  CHECK_EQUAL(offload_aio_open(backend, 1, 1, 1000, &handle), -EINVAL);
  CHECK_EQUAL(offload_aio_open(backend, 1, 1, 0, nullptr), -EINVAL);
  CHECK_EQUAL(offload_aio_done(123456, 1), -EBADF);
  Engine engine;
  std::vector<char> byte(1);
  CHECK_EQUAL(offload_aio_submit(engine.handle, 1, 0, nullptr, 1, 0, 0, &id), -EINVAL);
  CHECK_EQUAL(offload_aio_submit(engine.handle, 1, 0, byte.data(), 1, UINT64_MAX, 0, &id), -EOVERFLOW);
  CHECK_EQUAL(offload_aio_done(engine.handle, 99), -ENOENT);
}

}  // namespace

int main() {
  char text[200];
  const bool uring = offload_aio_probe_uring(text, sizeof text) == 0;
  if (!uring) std::fprintf(stderr, "without io_uring: %s\n", text);
  RUN(reads_go_first_and_writes_go_on);
  for (const std::int32_t one : {OFFLOAD_AIO_THREADS, OFFLOAD_AIO_URING}) {
    if (one == OFFLOAD_AIO_URING && !uring) continue;
    backend = one;
    RUN(what_was_written_is_read_back);
    RUN(errors_end_a_request_and_nothing_else);
    RUN(many_threads_submit_and_wait);
    RUN(several_threads_wait_for_one);
    RUN(close_drains);
    RUN(waiting_has_an_end);
    RUN(a_forked_child_has_no_engines);
    RUN(wrong_arguments_are_refused);
  }
  std::fprintf(stderr, "all well\n");
}
