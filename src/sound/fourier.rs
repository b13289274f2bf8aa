//! Discrete Fourier transform by the algorithm of Cooley and Tukey (1965), for lengths with the factors 2 and 5. `realfft` would
//! add 190 KiB to a WASM module.

/// A complex number: its real and its imaginary part.
pub(super) type Complex = [f64; 2];

/// A transform of fixed length.
pub(super) struct Fourier {
    /// `exp(-2 pi i k / n)` for each k.
    turns: Vec<Complex>,
}

/// The largest factor.
const MAX_FACTOR: usize = 5;

impl Fourier {
    /// Of this length, a product of twos and fives.
    pub fn new(n: usize) -> Fourier {
        let turn = |k: usize| {
            let (sin, cos) = (-std::f64::consts::TAU * k as f64 / n as f64).sin_cos();
            [cos, sin]
        };
        Fourier { turns: (0..n).map(turn).collect() }
    }

    /// `y[k] = sum over t of x[t] exp(-2 pi i k t / n)`; both have the transform's length.
    pub fn run(&self, x: &[Complex], y: &mut [Complex]) {
        self.part(x, 1, y);
    }

    /// The transform of every `stride`-th element of `x`.
    fn part(&self, x: &[Complex], stride: usize, y: &mut [Complex]) {
        let n = y.len();
        let Some(factor) = [4, 5, 2].into_iter().find(|factor| n.is_multiple_of(*factor)) else {
            y.iter_mut().zip(x).for_each(|(y, x)| *y = *x);
            return;
        };
        let m = n / factor;
        for (i, y) in y.chunks_exact_mut(m).enumerate() {
            self.part(&x[i * stride..], stride * factor, y);
        }
        for k in 0..m {
            let mut parts = [[0.0; 2]; MAX_FACTOR];
            for (i, part) in parts[..factor].iter_mut().enumerate() {
                *part = product(y[i * m + k], self.turns[i * k * stride]);
            }
            for q in 0..factor {
                let mut sum = parts[0];
                for (i, part) in parts[1..factor].iter().enumerate() {
                    let [re, im] = product(*part, self.turns[(i + 1) * q % factor * (m * stride)]);
                    sum = [sum[0] + re, sum[1] + im];
                }
                y[q * m + k] = sum;
            }
        }
    }
}

fn product([a, b]: Complex, [c, d]: Complex) -> Complex {
    [a * c - b * d, a * d + b * c]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transforms_are_the_sums_that_define_them() {
        for n in [1, 2, 5, 20, 400] {
            let x: Vec<Complex> = (0..n).map(|t| [(t as f64 * 0.7).sin(), (t * t % 13) as f64 * 0.1]).collect();
            let mut y = vec![[0.0; 2]; n];
            Fourier::new(n).run(&x, &mut y);
            for (k, found) in y.iter().enumerate() {
                let mut want = [0.0; 2];
                for (t, x) in x.iter().enumerate() {
                    let (sin, cos) = (-std::f64::consts::TAU * (k * t) as f64 / n as f64).sin_cos();
                    let [re, im] = product(*x, [cos, sin]);
                    want = [want[0] + re, want[1] + im];
                }
                assert!((0..2).all(|i| (found[i] - want[i]).abs() < 1e-9), "{k} of {n}: {found:?}, expected {want:?}");
            }
        }
    }
}
