// Fixed-width types and conversions, without toolkit headers: bfloat16 and float16 are 16-bit integers here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Element types, as the host numbers them.
#define BF16 1
#define F16 2
#define F32 3
#define E4M3 4
#define E5M2 5

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NEG_INF (-__int_as_float(0x7f800000))

template <int T> struct Wide;  // to and from float32

template <> struct Wide<BF16> {
    typedef u16 store;
    static __device__ __forceinline__ float up(u16 x) { return __uint_as_float((u32)x << 16); }
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
        return r;
    }
    static __device__ __forceinline__ u16 down(float x) { return (u16)pack(x, 0.f); }
};

template <> struct Wide<F16> {
    typedef u16 store;
    static __device__ __forceinline__ float up(u16 x) {
        float r;
        asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
        return r;
    }
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
        return r;
    }
    static __device__ __forceinline__ u16 down(float x) { return (u16)pack(x, 0.f); }
};

template <> struct Wide<F32> {
    typedef float store;
    static __device__ __forceinline__ float up(float x) { return x; }
    static __device__ __forceinline__ float down(float x) { return x; }
};

// 8-bit floats (OCP). Rounds to nearest even; finite and infinite values saturate, NaN stays NaN.
template <> struct Wide<E4M3> {
    typedef u8 store;
    static __device__ __forceinline__ u8 down(float x) {
        u32 b = __float_as_uint(x), sign = (b >> 24) & 0x80u;
        float a = fabsf(x);
        if (!(a == a)) return 0x7f;
        u32 code;
        if (a >= 448.f) code = 0x7e;
        else if (a < 0.015625f) code = (u32)__float2int_rn(a * 512.f);
        else {
            u32 m = __float_as_uint(a);
            m += 0x7ffffu + ((m >> 20) & 1u);
            code = (m >> 20) - ((127u - 7u) << 3);
            code = code < 0x7eu ? code : 0x7eu;
        }
        return (u8)(sign | code);
    }
    static __device__ __forceinline__ float up(u8 x) {
        u32 m = x & 0x7fu;
        // The exponent's bias is 7: shifted into float32's place, the value is 2^-120 times what it should be.
        float a = __uint_as_float(m << 20) * __uint_as_float(0x7b800000u);
        if (m == 0x7fu) a = __uint_as_float(0x7fc00000u);
        return (x & 0x80u) ? -a : a;
    }
};

template <> struct Wide<E5M2> {
    typedef u8 store;
    static __device__ __forceinline__ u8 down(float x) {
        u32 b = __float_as_uint(x), sign = (b >> 24) & 0x80u;
        float a = fabsf(x);
        if (!(a == a)) return 0x7f;
        u32 code;
        if (a >= 57344.f) code = 0x7b;
        else if (a < 6.103515625e-5f) code = (u32)__float2int_rn(a * 65536.f);
        else {
            u32 m = __float_as_uint(a);
            m += 0xfffffu + ((m >> 21) & 1u);
            code = (m >> 21) - ((127u - 15u) << 2);
            code = code < 0x7bu ? code : 0x7bu;
        }
        return (u8)(sign | code);
    }
    static __device__ __forceinline__ float up(u8 x) { return Wide<F16>::up((u16)((u32)x << 8)); }
};

// Two 8-bit floats, the lower byte first, as two 16-bit ones; exact.
template <int KV, int T> __device__ __forceinline__ u32 widen2(u32 pair) {
#if __CUDA_ARCH__ >= 890
    u32 h;
    if (KV == E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((u16)pair));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(h) : "h"((u16)pair));
    if (T == F16) return h;
    return Wide<BF16>::pack(Wide<F16>::up((u16)h), Wide<F16>::up((u16)(h >> 16)));
#else
    float lo = Wide<KV>::up((u8)pair), hi = Wide<KV>::up((u8)(pair >> 8));
    return Wide<T>::pack(lo, hi);
#endif
}
