//! Knowledge of an adapter and driver beyond features and limits: shader variants that failed the self-test, which
//! runs before any result is returned, and variants measured to be faster than the defaults. Natively both are saved
//! to a file; in a browser, by the page if it requests the measurements.

// The kernels-only build saves nothing.
mod file;
mod first_load;
mod measure;
pub(crate) mod operands;
mod self_test;

use crate::dtype::DType;

pub(crate) use file::{from_folder, write};
pub use first_load::TuneOnLoad;
pub(crate) use first_load::tuned_for_load;
pub use measure::tune;
pub use measure::{Timed, TunedRow};
pub(crate) use measure::{products, tune_load};
pub(crate) use self_test::{record_tested, self_test, while_testing};

/// Maximum normalised mean squared error of equal results; products staged in half precision reach 2e-7.
const MAX_NMSE: f64 = 1e-6;

/// Reports how outputs of the same kernels differ, if by more than [`MAX_NMSE`].
fn compare((dtype, got): &(DType, Vec<u32>), (_, want): &(DType, Vec<u32>)) -> Result<(), String> {
    if *dtype == DType::U32 {
        let differs = got.iter().zip(want).find(|(got, want)| got != want);
        return differs.map_or(Ok(()), |(got, want)| Err(format!("it gave {got} for {want}")));
    }
    let (mut noise, mut power) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want) {
        let [got, want] = [got, want].map(|bits| f64::from(f32::from_bits(bits)));
        noise += (got - want).powi(2);
        power += want.powi(2);
    }
    // Written so that a NaN fails.
    if noise <= MAX_NMSE * power { Ok(()) } else { Err(format!("its error is {:.1e} of the result", noise / power)) }
}
