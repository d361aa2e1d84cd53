// What the emulator needs in C: hooks that run for every instruction, and two symbols of a newer C
// library that the wheel was linked against.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

unsigned long long __isoc23_strtoull(const char *s, char **e, int b) { return strtoull(s, e, b); }
int __isoc23_sscanf(const char *s, const char *f, ...) {
    va_list a;
    va_start(a, f);
    int r = vsscanf(s, f, a);
    va_end(a);
    return r;
}

// The wheel's own table of processors ends before Sapphire Rapids, which the emulator has: this answers in
// its place, because the emulator looks the symbol up by name and this library is loaded first.
static const char *models[64];
static void *model, *(*other_parameters)(const char *);
void choose(void *lookup, void *make, uint32_t number) {
    for (int i = 0; i < 63; i++) models[i] = "model";
    other_parameters = lookup;
    model = ((void *(*)(const char *, const char **, uint32_t))make)("model", models, number);
}
void *sim_get_param_enum(const char *name) {
    return strcmp(name, "cpu.model") ? other_parameters(name) : model;
}

// CPUID leaf 7 of that processor, with AMX-BF16 and AMX-TILE where the program is to see them.
struct leaf { uint32_t a, b, c, d; };
static void (*leaf_7)(const void *, uint32_t, struct leaf *);
static int show_amx;
void announce(void *original, int amx) { leaf_7 = original, show_amx = amx; }
void _ZNK17sapphire_rapids_t20get_std_cpuid_leaf_7EjP16cpuid_function_t(const void *self, uint32_t sub,
                                                                         struct leaf *out) {
    leaf_7(self, sub, out);
    if (sub == 0 && show_amx) out->d |= 1 << 22 | 1 << 24;
}

// Why the processor stopped.
enum { RUNNING, HALTED, FAULT, QUANTUM };
struct report {
    uint32_t why, vector, error;
    uint64_t instructions; // in all
    uint64_t quantum;      // instructions until it is another thread's turn; 0: none
    uint64_t opcodes[8192];
    uint8_t sample[8192][16]; // the bytes of one instruction of each opcode
};
struct report report;

static void *cpu;
static void (*stop)(void *);
static uint32_t (*opcode_of)(const void *);
static uint64_t (*pc)(void *);
static const uint8_t *memory;
static uint64_t memory_size;

static uint64_t (*get_register)(uint32_t, uint32_t);
static void (*set_pc)(void *, uint64_t);
#include "amx.c"
static uint64_t reg(int r) { return get_register(0, r); }
static int in_memory(uint64_t at, uint64_t n) { return at >= 1 << 21 && at <= memory_size && n <= memory_size - at; }
static uint8_t *host(uint64_t at) { return (uint8_t *)memory + at; }

static void halt(void *x, uint32_t id) {
    report.why = HALTED;
    stop(cpu);
}
static void exception(void *x, uint32_t id, uint32_t vector, uint32_t error) {
    // The program counter is past the instruction already: it is the longest that ends there.
    uint64_t end = pc(cpu);
    for (int n = 10; vector == 6 && n >= 5 && in_memory(end - n, n); n--) {
        if (length_of(memory + end - n) != n) continue;
        int length = amx(memory + end - n);
        if (length > 0) {
            tiles.executed++;
            set_pc(cpu, end);
            return;
        }
        if (length < 0) vector = -length;
        break;
    }
    report.why = FAULT;
    report.vector = vector;
    report.error = error;
    stop(cpu);
}
static void turn(void *x, uint32_t id, void *i) {
    if (report.quantum && --report.quantum == 0) {
        report.why = QUANTUM;
        stop(cpu);
    } else {
        report.instructions++;
    }
}
static void count(void *x, uint32_t id, void *i) {
    uint32_t op = opcode_of(i) & 8191;
    if (report.opcodes[op]++ == 0) {
        uint64_t at = pc(cpu);
        for (int b = 0; b < 16 && at + b < memory_size; b++) report.sample[op][b] = memory[at + b];
    }
    turn(x, id, i);
}

// The wheel's table of hooks: all pointers, in its order.
struct hooks {
    void *ctx, *reset, *hlt, *mwait, *taken, *not_taken, *ucnear, *far, *opcode, *interrupt, *exception,
        *hw_interrupt, *tlb, *cache, *prefetch, *clflush, *before, *after, *repeat, *inp, *inp2, *outp, *lin,
        *phy, *cpuid, *wrmsr, *vmexit;
};
static struct hooks hooks;
void *chain[2] = {&hooks, 0};

void prepare(void *cpu_, void *stop_, void *opcode_, void *pc_, void *set_pc_, void *reg_, void *insert, uint8_t *base, uint64_t size) {
    cpu = cpu_, set_pc = set_pc_, get_register = reg_, stop = stop_, opcode_of = opcode_, pc = pc_, memory = base, memory_size = size;
    for (uint64_t at = 0; at < size; at += 4096) ((void (*)(uint64_t, uint8_t *))insert)(at, base + at);
    hooks.hlt = halt;
    hooks.exception = exception;
}
// Whether instructions are counted (1: in all, 2: by opcode); switching between threads counts too.
void watch(int level) { hooks.before = level == 0 ? 0 : level == 1 ? (void *)turn : (void *)count; }
