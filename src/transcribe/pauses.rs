//! Where a sound is cut into windows that are heard apart from each other: at pauses, which are known by their energy.

use crate::sound::HOP;

/// Frames on each side of a cut that its energy is of: 0.2 s together.
const REACH: u32 = 10;

/// Frames that a cut leaves at least: of less, a model invents text.
const LEAST_REST: u32 = 100;

/// Frames from `seek` on up to the cut: all that are left if they are no more than `n_window`, or else up to the quietest place
/// in the last third of a window, the latest of several.
pub(super) fn window_size(samples: &[f32], seek: u32, [n_window, n_frames]: [u32; 2]) -> u32 {
    let left = n_frames - seek;
    if left <= n_window {
        return left;
    }
    let earliest = seek + least_size(n_window);
    let first = earliest.saturating_sub(REACH);
    let energies: Vec<f64> = (first..seek + n_window + REACH).map(|frame| energy(samples, frame)).collect();
    let around = |cut: u32| -> f64 {
        let [from, to] = [cut.saturating_sub(REACH), cut + REACH].map(|frame| (frame - first) as usize);
        energies[from..to].iter().sum()
    };
    let latest = (seek + n_window).min(n_frames.saturating_sub(LEAST_REST)).max(earliest);
    let (mut quietest, mut cut) = (f64::INFINITY, latest);
    for at in earliest..=latest {
        let energy = around(at);
        if energy <= quietest {
            (quietest, cut) = (energy, at);
        }
    }
    cut - seek
}

/// Frames of a window up to the last sound, which is no click: half of the 0.3 s before its end have at least a hundredth of the
/// window's mean energy.
pub(super) fn sound_size(samples: &[f32], [seek, size]: [u32; 2]) -> u32 {
    const FRAMES: usize = 30;
    let energies: Vec<f64> = (seek..seek + size).map(|frame| energy(samples, frame)).collect();
    let least = energies.iter().sum::<f64>() / f64::from(size.max(1)) / 100.0;
    let loud: Vec<bool> = energies.iter().map(|&energy| energy > least).collect();
    let is_sound = |&last: &usize| {
        let before = &loud[(last + 1).saturating_sub(FRAMES)..=last];
        loud[last] && 2 * before.iter().filter(|&&loud| loud).count() >= FRAMES.min(loud.len())
    };
    (0..loud.len()).rev().find(is_sound).map_or(0, |last| last as u32 + 1)
}

fn energy(samples: &[f32], frame: u32) -> f64 {
    let at = (frame as usize * HOP).min(samples.len());
    let frame = &samples[at..samples.len().min(at + HOP)];
    frame.iter().map(|&sample| f64::from(sample).powi(2)).sum()
}

/// Frames of a window at least, unless no more are left.
pub(super) fn least_size(n_window: u32) -> u32 {
    n_window - n_window / 3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tone with pauses that begin at these frames and have so many.
    fn sound(n_frames: u32, pauses: &[[u32; 2]]) -> Vec<f32> {
        let is_pause = |frame: u32| pauses.iter().any(|[first, n]| (*first..first + n).contains(&frame));
        let sample = |i: u32| if is_pause(i / HOP as u32) { 1e-3 } else { 0.5 };
        (0..n_frames * HOP as u32).map(|i| if i % 2 == 0 { sample(i) } else { -sample(i) }).collect()
    }

    #[test]
    fn cuts_are_in_pauses_of_the_last_third() {
        // Before the last third; in it, and a shorter one after that.
        let all = sound(1000, &[[150, 40], [230, 30], [280, 8]]);
        assert_eq!(window_size(&all, 0, [300, 1000]), 250);
        assert_eq!(window_size(&all, 10, [300, 1000]), 240);
        // No tiny rest.
        assert_eq!(window_size(&sound(320, &[]), 0, [300, 320]), 220);
        // The latest place where all are as loud, and the latest of a long pause.
        assert_eq!(window_size(&sound(1000, &[]), 100, [300, 1000]), 300);
        assert_eq!(window_size(&sound(1000, &[[200, 500]]), 0, [300, 1000]), 300);
    }

    #[test]
    fn quiet_ends_are_known() {
        let all = sound(400, &[[150, 40], [250, 150]]);
        assert_eq!(sound_size(&all, [0, 300]), 250);
        assert_eq!(sound_size(&all, [100, 70]), 50);
        assert_eq!(sound_size(&all, [0, 150]), 150);
        assert_eq!(sound_size(&[0.0; 4000], [0, 25]), 0);
        // A click is no sound.
        assert_eq!(sound_size(&sound(400, &[[250, 30], [281, 119]]), [0, 300]), 250);
    }

    #[test]
    fn what_fits_a_window_is_not_cut() {
        let all = sound(400, &[[250, 40]]);
        assert_eq!(window_size(&all, 100, [300, 400]), 300);
        assert_eq!(window_size(&all, 399, [300, 400]), 1);
        assert_eq!(window_size(&all, 0, [2, 400]), 2);
        assert_eq!(window_size(&all, 0, [1, 400]), 1);
    }
}
