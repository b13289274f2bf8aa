//! Rows of cached keys and values as `shaders/shared/row_f32.wgsl` and its like lay them out.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::dtype::BLOCK;
use crate::kernels::KvType;

/// Rounds a head to a row.
pub(crate) fn write_row(kind: KvType, head: &[f32], row: &mut [u32]) {
    match kind {
        KvType::F32 => row.copy_from_slice(bytemuck::cast_slice(head)),
        KvType::F16 => {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(row);
            let (halves, rest) = halves.split_at_mut(head.len());
            for (half, &x) in halves.iter_mut().zip(head) {
                *half = f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_bits();
            }
            rest.fill(0);
        }
        KvType::Q8_0 => {
            let (quants, scales) = row.split_at_mut(head.len().div_ceil(BLOCK) * BLOCK / 4);
            scales.fill(0);
            for ((block, quants), scale_bits) in head.chunks(BLOCK).zip(quants.chunks_mut(BLOCK / 4)).zip(scales) {
                let scale = block.iter().fold(0.0f32, |highest, x| highest.max(x.abs())) / 127.0;
                // A scale so small that its inverse overflows stands for zeros.
                let inverse = if scale > 1e-37 { 1.0 / scale } else { 0.0 };
                *scale_bits = scale.to_bits();
                let quants: &mut [i8] = bytemuck::cast_slice_mut(quants);
                quants.fill(0);
                for (quant, x) in quants.iter_mut().zip(block) {
                    *quant = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
                }
            }
        }
    }
}

/// What a row holds.
pub(crate) fn read_row(kind: KvType, row: &[u32], head: &mut [f32]) {
    match kind {
        KvType::F32 => head.copy_from_slice(&bytemuck::cast_slice(row)[..head.len()]),
        KvType::F16 => {
            let halves: &[u16] = bytemuck::cast_slice(row);
            halves[..head.len()].reinterpret_cast::<f16>().convert_to_f32_slice(head);
        }
        KvType::Q8_0 => {
            let (quants, scales) = row.split_at(head.len().div_ceil(BLOCK) * BLOCK / 4);
            for ((block, quants), &scale) in head.chunks_mut(BLOCK).zip(quants.chunks(BLOCK / 4)).zip(scales) {
                let (scale, quants): (f32, &[i8]) = (f32::from_bits(scale), bytemuck::cast_slice(quants));
                block.iter_mut().zip(quants).for_each(|(x, &quant)| *x = scale * f32::from(quant));
            }
        }
    }
}
