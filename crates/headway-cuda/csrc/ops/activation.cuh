// The activations of feed-forwards. Mirrored in `src/kernels/activation.rs`.
#pragma once

#define SILU 0
#define GELU_TANH 1
#define GELU 2
#define CLAMPED_SWIGLU 3
#define RELU2 4

struct Activation {
    int kind;
    float alpha, limit;
};

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ __forceinline__ float activate(int kind, float x) {
    switch (kind) {
        case SILU: return silu(x);
        case GELU_TANH: return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
        case GELU: return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
        default: {
            float y = fmaxf(x, 0.f);
            return y * y;
        }
    }
}

__device__ __forceinline__ float gated(const Activation& a, float gate, float up) {
    if (a.kind != CLAMPED_SWIGLU) return activate(a.kind, gate) * up;
    float g = fminf(gate, a.limit), u = fminf(fmaxf(up, -a.limit), a.limit);
    return g / (1.f + __expf(-a.alpha * g)) * (u + 1.f);
}
