//! XXH64, which tells contents from each other at the speed of memory. It is no cryptographic digest: whoever wants two
//! contents with the same one can make them.
//!
//! By Yann Collet: <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>.

const PRIMES: [u64; 5] =
    [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63, 0x27d4_eb2f_1656_67c5];
/// Bytes of a word for each lane.
const STRIPE: usize = 32;

/// A digest of bytes that come in pieces; how they are cut does not matter.
#[derive(Clone)]
pub(crate) struct Xxh64 {
    lanes: [u64; 4],
    /// The beginning of a stripe whose end has not come.
    rest: [u8; STRIPE],
    n_rest: usize,
    n_bytes: u64,
}

impl Xxh64 {
    /// Of nothing yet, with seed 0.
    pub fn new() -> Xxh64 {
        let [first, second, ..] = PRIMES;
        let lanes = [first.wrapping_add(second), second, 0, first.wrapping_neg()];
        Xxh64 { lanes, rest: [0; STRIPE], n_rest: 0, n_bytes: 0 }
    }

    /// That of these bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut digest = Xxh64::new();
        digest.add(bytes);
        digest.finish()
    }

    pub fn add(&mut self, mut bytes: &[u8]) {
        self.n_bytes = self.n_bytes.wrapping_add(bytes.len() as u64);
        if self.n_rest > 0 || bytes.len() < STRIPE {
            let (head, tail) = bytes.split_at(bytes.len().min(STRIPE - self.n_rest));
            self.rest[self.n_rest..][..head.len()].copy_from_slice(head);
            self.n_rest += head.len();
            if self.n_rest < STRIPE {
                return;
            }
            self.lanes = stirred(self.lanes, &self.rest);
            bytes = tail;
        }
        let (stripes, tail) = bytes.as_chunks();
        self.lanes = stripes.iter().fold(self.lanes, stirred);
        self.rest[..tail.len()].copy_from_slice(tail);
        self.n_rest = tail.len();
    }

    pub fn finish(&self) -> u64 {
        let [one, two, three, four, five] = PRIMES;
        let mut sum = match self.n_bytes {
            0..32 => five,
            _ => {
                let [a, b, c, d] = self.lanes;
                let turned = [a.rotate_left(1), b.rotate_left(7), c.rotate_left(12), d.rotate_left(18)];
                let joined = turned.into_iter().fold(0, u64::wrapping_add);
                let merge = |sum: u64, lane| (sum ^ round(0, lane)).wrapping_mul(one).wrapping_add(four);
                self.lanes.into_iter().fold(joined, merge)
            }
        };
        sum = sum.wrapping_add(self.n_bytes);
        let (words, rest) = self.rest[..self.n_rest].as_chunks();
        for &word in words {
            sum = (sum ^ round(0, u64::from_le_bytes(word))).rotate_left(27).wrapping_mul(one).wrapping_add(four);
        }
        let (halves, rest) = rest.as_chunks();
        for &half in halves {
            let half = u64::from(u32::from_le_bytes(half)).wrapping_mul(one);
            sum = (sum ^ half).rotate_left(23).wrapping_mul(two).wrapping_add(three);
        }
        for &byte in rest {
            sum = (sum ^ u64::from(byte).wrapping_mul(five)).rotate_left(11).wrapping_mul(one);
        }
        sum = (sum ^ (sum >> 33)).wrapping_mul(two);
        sum = (sum ^ (sum >> 29)).wrapping_mul(three);
        sum ^ (sum >> 32)
    }
}

/// The lanes after another stripe.
#[inline]
fn stirred(lanes: [u64; 4], stripe: &[u8; STRIPE]) -> [u64; 4] {
    let (words, _) = stripe.as_chunks();
    std::array::from_fn(|i| round(lanes[i], u64::from_le_bytes(words[i])))
}

#[inline]
fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(PRIMES[1])).rotate_left(31).wrapping_mul(PRIMES[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    const VECTORS: [(usize, &str); 11] = [
        (0, "ef46db3751d8e999"),
        (1, "e934a84adb052768"),
        (4, "ffced8604453cc1e"),
        (8, "884a173614b81b8d"),
        (15, "a948f5f0f6abac2d"),
        (31, "c346d2b59b4d8ee1"),
        (32, "cbf59c5116ff32b4"),
        (33, "0c535d1acafb8ead"),
        (47, "0d9883a03e7bfbb8"),
        (64, "f7c67301db6713f0"),
        (1000, "f306f04aa88b54d3"),
    ];

    #[test]
    fn xxh64_digests_match_the_python_package() {
        // As the package `xxhash` of Python computes them: `xxhash.xxh64(bytes(i % 251 for i in range(n))).hexdigest()`.
        for (n, want) in VECTORS {
            let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
            assert_eq!(format!("{:016x}", Xxh64::of(&bytes)), want, "{n} bytes");
            for piece in [1, 7, 31, 32, 33, 100] {
                let mut digest = Xxh64::new();
                bytes.chunks(piece).for_each(|piece| digest.add(piece));
                assert_eq!(format!("{:016x}", digest.finish()), want, "{n} bytes in pieces of {piece}");
            }
        }
    }
}
