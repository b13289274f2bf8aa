// Functions of SPIR-V that C++ has no operator for.

#define INLINE static __device__ __forceinline__

struct half {
    unsigned short bits;
    half() = default;
    __device__ explicit half(unsigned short bits) : bits(bits) {}
    __device__ explicit half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ explicit operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

#define HALF(name, instruction)                                                                     \
    INLINE half name(half a, half b) {                                                              \
        unsigned short bits;                                                                        \
        asm(instruction " %0, %1, %2;" : "=h"(bits) : "h"(a.bits), "h"(b.bits));                    \
        return half(bits);                                                                          \
    }
HALF(operator+, "add.f16")
HALF(operator-, "sub.f16")
HALF(operator*, "mul.f16")
INLINE half operator/(half a, half b) { return half((float)a / (float)b); }
INLINE half operator-(half a) { return half((unsigned short)(a.bits ^ 0x8000u)); }
INLINE half fused(half a, half b, half c) {
    unsigned short bits;
    asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(bits) : "h"(a.bits), "h"(b.bits), "h"(c.bits));
    return half(bits);
}

INLINE half low_half(unsigned word) { return half((unsigned short)word); }
INLINE unsigned two_halves(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INLINE float sign(float a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : 0.0f; }
INLINE float fraction(float a) { return a - floorf(a); }
INLINE float mix(float a, float b, float at) { return a + (b - a) * at; }
INLINE float step_at(float edge, float a) { return a < edge ? 0.0f : 1.0f; }
INLINE float scaled(float a, unsigned exponent) { return ldexpf(a, (int)exponent); }
INLINE unsigned absolute(unsigned a) { return (int)a < 0 ? 0u - a : a; }

INLINE float least(float a, float b) { return fminf(a, b); }
INLINE float most(float a, float b) { return fmaxf(a, b); }
INLINE unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }
INLINE unsigned most(unsigned a, unsigned b) { return a > b ? a : b; }
INLINE unsigned signed_least(unsigned a, unsigned b) { return (int)a < (int)b ? a : b; }
INLINE unsigned signed_most(unsigned a, unsigned b) { return (int)a > (int)b ? a : b; }
template <class T> INLINE T within(T a, T low, T high) { return least(most(a, low), high); }
INLINE unsigned signed_within(unsigned a, unsigned low, unsigned high) { return signed_least(signed_most(a, low), high); }

INLINE unsigned bits_of(unsigned a, unsigned offset, unsigned n) {
    return n == 0u ? 0u : (a >> offset) & (0xffffffffu >> (32u - n));
}
INLINE unsigned signed_bits_of(unsigned a, unsigned offset, unsigned n) {
    return n == 0u ? 0u : (unsigned)((int)(a << (32u - offset - n)) >> (32u - n));
}
INLINE unsigned with_bits(unsigned a, unsigned b, unsigned offset, unsigned n) {
    unsigned mask = n == 0u ? 0u : (0xffffffffu >> (32u - n)) << offset;
    return (a & ~mask) | ((b << offset) & mask);
}
INLINE unsigned lowest_bit(unsigned a) { return (unsigned)(__ffs((int)a) - 1); }
INLINE unsigned highest_bit(unsigned a) { return a == 0u ? 0xffffffffu : 31u - (unsigned)__clz((int)a); }

// A subgroup is a warp, all of whose lanes take part.
INLINE bool elect() { return threadIdx.x % 32u == 0u; }
INLINE bool all(bool a) { return __all_sync(~0u, a); }
INLINE bool any(bool a) { return __any_sync(~0u, a); }
INLINE unsigned ballot(bool a) { return __ballot_sync(~0u, a); }
template <class T> INLINE T shuffle(T a, unsigned lane) { return __shfl_sync(~0u, a, lane); }
template <class T> INLINE T first(T a) { return __shfl_sync(~0u, a, 0); }
template <class T> INLINE T shuffle_xor(T a, unsigned mask) { return __shfl_xor_sync(~0u, a, mask); }
template <class T> INLINE T shuffle_up(T a, unsigned by) { return __shfl_up_sync(~0u, a, by); }
template <class T> INLINE T shuffle_down(T a, unsigned by) { return __shfl_down_sync(~0u, a, by); }

struct Sum {
    template <class T> static __device__ T of(T a, T b) { return a + b; }
};
struct Max {
    template <class T> static __device__ T of(T a, T b) { return most(a, b); }
};
struct Min {
    template <class T> static __device__ T of(T a, T b) { return least(a, b); }
};
struct Or {
    template <class T> static __device__ T of(T a, T b) { return a | b; }
};
template <class Op, class T> INLINE T reduce(T a) {
    for (unsigned mask = 16u; mask > 0u; mask >>= 1u) {
        a = Op::of(a, shuffle_xor(a, mask));
    }
    return a;
}
template <class Op, class T> INLINE T inclusive(T a) {
    for (unsigned by = 1u; by < 32u; by <<= 1u) {
        T before = shuffle_up(a, by);
        a = threadIdx.x % 32u >= by ? Op::of(a, before) : a;
    }
    return a;
}
template <class Op, class T> INLINE T exclusive(T a) {
    T before = shuffle_up(inclusive<Op>(a), 1u);
    return threadIdx.x % 32u == 0u ? T() : before;
}
