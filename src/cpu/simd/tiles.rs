//! Products by AMX: tiles of sixteen lines of BF16, multiplied with sums in f32. On Linux, where a process asks to use them.

/// As many BF16 as a cache line holds: those of a block.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in super::super) struct Line(pub [u16; 32]);

/// Two tiles. Of the first factor, a line is a block of one row. Of the second one, a line has two elements of each of sixteen
/// rows: elements 2i and 2i + 1 of their blocks are in line i of the rows' tile.
pub(in super::super) type Pair = [[Line; 16]; 2];

/// Sums of two tiles of rows with one tile of the second factor's.
pub(in super::super) type Sums = [Square; 2];

/// Sums of a tile, in cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in super::super) struct Square(pub [[f32; 16]; 16]);

/// A loop over tiles.
pub(in super::super) trait TileWork {
    /// Does the work.
    fn run_tiles<W: super::Wide, L: super::Lanes<16>>(self, tiles: &Configured);
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(in super::super) use self::amx::{Configured, Tiles};
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(in super::super) use self::none::{Configured, Tiles};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::sync::LazyLock;

    use super::super::avx512::{self, Sixteen};
    use super::{Line, Pair, Sums, TileWork};

    /// Proof that this process may use tiles.
    #[derive(Clone, Copy)]
    pub struct Tiles(());

    /// Proof that this thread's tiles have the shape that products need.
    pub struct Configured(());

    /// Whether the processor has the instructions, and the system lets this process use them.
    fn is_there() -> bool {
        avx512::is_there() && is_x86_feature_detected!("avx512bf16") && has_tiles() && is_allowed()
    }

    // Newer compilers know that the instruction is safe.
    #[allow(unused_unsafe)]
    fn has_tiles() -> bool {
        const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
        // SAFETY: processors with AVX-512 have the instruction, and this leaf of it.
        unsafe { __cpuid_count(7, 0) }.edx & TILE_AND_BF16 == TILE_AND_BF16
    }

    /// Asks for the permission, which all threads of a process share.
    fn is_allowed() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const REQUEST_PERMISSION: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: the system call reads and writes no memory, and changes the registers that are named. Systems that do not
        // know the request return an error.
        unsafe {
            asm!(
                "syscall",
                inout("rax") result,
                in("rdi") REQUEST_PERMISSION,
                in("rsi") TILE_DATA,
                out("rcx") _,
                out("r11") _,
                options(nostack)
            );
        }
        result == 0
    }

    impl Tiles {
        /// Those of this processor.
        pub fn of_processor() -> Option<Tiles> {
            static IS_THERE: LazyLock<bool> = LazyLock::new(is_there);
            IS_THERE.then_some(Tiles(()))
        }

        /// Does work that itself runs no other.
        pub fn run<W: TileWork>(self, work: W) {
            // SAFETY: the processor has the features, since there are tiles.
            unsafe { run(work) }
        }
    }

    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bf16")]
    fn run<W: TileWork>(work: W) {
        /// Eight tiles of sixteen lines.
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start: u8,
            reserved: [u8; 14],
            line_bytes: [u16; 16],
            lines: [u8; 16],
        }
        let (mut line_bytes, mut lines) = ([0; 16], [0; 16]);
        line_bytes[..8].fill(64);
        lines[..8].fill(16);
        let configuration = Configuration { palette: 1, start: 0, reserved: [0; 14], line_bytes, lines };
        // SAFETY: the process may use tiles, and the configuration is a valid one of 64 bytes. The compiler uses no tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
        work.run_tiles::<[Sixteen; 2], Sixteen>(&Configured(()));
        // SAFETY: as above. Without tiles to save, threads are switched faster.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    impl Configured {
        /// Rounds to the nearest BF16, ties to even; NaN stays NaN.
        #[inline(always)]
        pub fn rounded(&self, x: &[f32; 32]) -> Line {
            let mut line = Line([0; 32]);
            // SAFETY: only `run` makes a `Configured`, where the processor has the features. The addresses are those of arrays
            // as long as what is loaded or stored.
            unsafe {
                let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(line.0.as_mut_ptr().cast(), both);
            }
            line
        }

        /// Sums of products of rows, those of both factors over all blocks: of 32 rows of `a` with the first sixteen, or with all
        /// rows of `b`. A sum is in the line of its row of `a`. Its bits depend on its own rows alone.
        ///
        /// # Panics
        /// If one factor has more blocks, or if there are none.
        #[inline(always)]
        pub fn multiply<const N: usize>(&self, a: &[Pair], b: &[Pair], sums: &mut [Sums; N]) {
            const { assert!(N == 1 || N == 2) }
            assert!(!a.is_empty() && a.len() == b.len());
            // SAFETY: only `run` makes a `Configured`, where the process may use tiles, and these have sixteen lines of 64 bytes.
            // As many pairs of such tiles are loaded as each slice has, and `2 * N` are stored to as many sums, each after 1024
            // bytes.
            unsafe {
                if N == 1 {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "2:",
                        "tileloadd tmm4, [{a} + {line}*1]",
                        "tileloadd tmm6, [{b} + {line}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{a} + {line}*1 + 1024]",
                        "tdpbf16ps tmm1, tmm5, tmm6",
                        "add {a}, 2048",
                        "add {b}, 2048",
                        "dec {n}",
                        "jnz 2b",
                        "tilestored [{sums} + {line}*1], tmm0",
                        "tilestored [{sums} + {line}*1 + 1024], tmm1",
                        a = inout(reg) a.as_ptr() => _,
                        b = inout(reg) b.as_ptr() => _,
                        n = inout(reg) a.len() => _,
                        sums = in(reg) sums.as_mut_ptr(),
                        line = in(reg) 64usize,
                        out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                        options(nostack)
                    );
                } else {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "2:",
                        "tileloadd tmm4, [{a} + {line}*1]",
                        "tileloadd tmm6, [{b} + {line}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm5, [{a} + {line}*1 + 1024]",
                        "tdpbf16ps tmm1, tmm5, tmm6",
                        "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                        "tdpbf16ps tmm2, tmm4, tmm7",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        "add {a}, 2048",
                        "add {b}, 2048",
                        "dec {n}",
                        "jnz 2b",
                        "tilestored [{sums} + {line}*1], tmm0",
                        "tilestored [{sums} + {line}*1 + 1024], tmm1",
                        "tilestored [{sums} + {line}*1 + 2048], tmm2",
                        "tilestored [{sums} + {line}*1 + 3072], tmm3",
                        a = inout(reg) a.as_ptr() => _,
                        b = inout(reg) b.as_ptr() => _,
                        n = inout(reg) a.len() => _,
                        sums = in(reg) sums.as_mut_ptr(),
                        line = in(reg) 64usize,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack)
                    );
                }
            }
        }
    }
}

/// Where there are no tiles.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod none {
    use super::{Line, Pair, Sums, TileWork};

    #[derive(Clone, Copy)]
    pub enum Tiles {}

    pub enum Configured {}

    impl Tiles {
        pub fn of_processor() -> Option<Tiles> {
            None
        }

        pub fn run<W: TileWork>(self, _: W) {
            match self {}
        }
    }

    impl Configured {
        pub fn rounded(&self, _: &[f32; 32]) -> Line {
            match *self {}
        }

        pub fn multiply<const N: usize>(&self, _: &[Pair], _: &[Pair], _: &mut [Sums; N]) {
            match *self {}
        }
    }
}
