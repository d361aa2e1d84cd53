// A kernel that throws what its first value says. The second counts objects that live in its frames.
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {
struct Counted {
    uint64_t& count;
    explicit Counted(uint64_t& c) : count(c) { ++count; }
    ~Counted() { --count; }
};
struct Own {
    std::string words;
};

void fail(uint64_t what) {
    switch (what) {
        case 0: throw std::runtime_error("no such head size: " + std::to_string(what + 7));
        case 1: throw 5;
        case 2: throw std::out_of_range("vector");
        case 3: throw Own{std::string(100, 'x')};
    }
}
}  // namespace

extern "C" void kernel(uint64_t* stack, uint64_t inputs, uint64_t outputs) {
    Counted counted(stack[1]);
    fail(stack[0]);
    stack[0] = stack[0] * inputs * outputs;
}
