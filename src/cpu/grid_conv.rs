//! `grid_conv`: convolutions over the patches of a picture.

use super::{Call, threads};
use crate::shaders::params::GridConvParams;

pub(crate) fn grid_conv(mut call: Call<'_>) {
    let params: GridConvParams = call.params();
    let [neighbours, x, weight, y] = call.operands();
    let (n_patches, channels, taps) = (params.n_patches as usize, params.channels as usize, params.taps as usize);
    let (neighbours, x, weight) = (neighbours.get::<u32>(), x.get::<f32>(), weight.get::<f32>());
    let row = |t: usize| x[t * 3 * channels..].split_at(channels);
    let y = &mut y.get_mut::<f32>()[..n_patches * channels];
    threads::for_each_chunk(y, channels, n_patches * channels * 2 * taps, |t, y| {
        y.fill(0.0);
        let seen = neighbours[t * taps..][..taps].iter().map(|&row| row as usize).enumerate();
        for (i, at) in seen.filter(|&(_, at)| at < n_patches) {
            let (b, rest) = row(at);
            let v = &rest[channels..][..channels];
            for (c, (y, (b, v))) in y.iter_mut().zip(b.iter().zip(v)).enumerate() {
                *y += weight[c * taps + i] * (b * v);
            }
        }
        y.iter_mut().zip(row(t).1).for_each(|(y, g)| *y *= g);
    });
}
