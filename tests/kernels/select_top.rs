//! `select_top` and `merge_top`: exact, the lowest id first among equals, for any previous lists.

use tilewright::kernels::{self, NO_ITEM, TopStrip};

use crate::harness::{Case, Job, Operand, Want};
use crate::inputs::{Inputs, Source};

/// B, N, S, K: around a round of 512 and of 4096 scores, parts that begin within a quad, more parts than columns, more
/// places than items, and lists of maximum length.
const SELECT: [[u32; 4]; 17] = [
    [1, 1, 1, 1],
    [2, 3, 4, 2],
    [3, 31, 2, 5],
    [2, 255, 3, 256],
    [1, 511, 1, 16],
    [1, 512, 1, 511],
    [2, 513, 1, 512],
    [3, 1023, 2, 513],
    [2, 1025, 1, 1],
    [2, 1537, 5, 100],
    [1, 4095, 1, 1023],
    [1, 4097, 1, 1024],
    [2, 6000, 1, 300],
    [2, 9001, 3, 17],
    [5, 10_000, 7, 10],
    [1, 20_011, 1, 1024],
    [1, 65_536, 1, 1024],
];

/// B, S, K.
const MERGE: [[u32; 3]; 9] =
    [[1, 1, 1], [2, 2, 1], [3, 5, 7], [1, 1, 1024], [2, 3, 511], [1, 2, 513], [2, 33, 16], [1, 9, 1024], [3, 128, 10]];

/// Change to the family's scores.
#[derive(Clone, Copy, PartialEq)]
enum Twist {
    None,
    /// Rounds to a few values, so that most are tied.
    Ties,
    /// Ascending rows, so that every score beats those before.
    Rising,
    /// Makes one element of the last row non-finite.
    Broken(f32),
}

const TWISTS: [(&str, Twist); 6] = [
    ("plain", Twist::None),
    ("ties", Twist::Ties),
    ("rising", Twist::Rising),
    ("nan", Twist::Broken(f32::NAN)),
    ("inf", Twist::Broken(f32::INFINITY)),
    ("-inf", Twist::Broken(f32::NEG_INFINITY)),
];

/// Allowed ids.
#[derive(Clone, Copy, PartialEq)]
enum Filter {
    All,
    /// A random half.
    Half,
    /// No id.
    None,
}

pub fn cases(cases: &mut Vec<Case>) {
    for (name, twist) in TWISTS {
        let families = match twist {
            Twist::None => {
                &[Inputs::Normal, Inputs::HalfMax, Inputs::Subnormal, Inputs::Constant, Inputs::SignedZeros][..]
            }
            Twist::Ties => &[Inputs::Uniform, Inputs::Student],
            Twist::Rising | Twist::Broken(_) => &[Inputs::Normal],
        };
        for (turn, &inputs) in families.iter().enumerate() {
            for (at, sizes) in SELECT.into_iter().enumerate() {
                let begins = (turn + at) % 2 == 0;
                let filter = [Filter::All, Filter::Half, Filter::Half, Filter::None][(turn + at / 2) % 4];
                let [b, n, s, k] = sizes;
                cases.push(Case {
                    kernel: "select_top",
                    variant: format!("{name}{}", if begins { "+begins" } else { "" }),
                    sizes: format!("b={b},n={n},s={s},k={k}"),
                    inputs,
                    build: Box::new(move |source| select_top(source, twist, sizes, begins, filter)),
                });
            }
            for sizes in MERGE {
                let [b, s, k] = sizes;
                cases.push(Case {
                    kernel: "merge_top",
                    variant: name.into(),
                    sizes: format!("b={b},s={s},k={k}"),
                    inputs,
                    build: Box::new(move |source| merge_top(source, twist, sizes)),
                });
            }
        }
    }
}

fn twisted(source: &mut Source, twist: Twist, rows: u32, cols: u32) -> Vec<f32> {
    let mut scores = source.rows(rows, cols);
    match twist {
        Twist::None => {}
        Twist::Ties => scores.iter_mut().for_each(|score| *score = score.clamp(-1.5, 1.5).round()),
        Twist::Rising => scores.chunks_exact_mut(cols as usize).for_each(|row| row.sort_by(f32::total_cmp)),
        Twist::Broken(value) => {
            let at = scores.len() - 1 - source.rng.below(cols as usize);
            scores[at] = value;
        }
    }
    scores
}

/// The first `k` of these items as a list in memory: non-finite ones, then by falling score and rising id.
fn best(mut items: Vec<(f32, u32)>, k: u32) -> Vec<u32> {
    items.sort_by(|a, b| match (a.0.is_finite(), b.0.is_finite()) {
        (true, true) => b.0.partial_cmp(&a.0).expect("finite scores").then(a.1.cmp(&b.1)),
        (a_finite, b_finite) => a_finite.cmp(&b_finite).then(a.1.cmp(&b.1)),
    });
    // In memory zeros have one sign and non-finite scores one bit pattern.
    let bits = |score: f32| if score.is_finite() { (score + 0.0).to_bits() } else { 0x7fff_ffff };
    let mut words: Vec<u32> = items.iter().take(k as usize).flat_map(|&(score, id)| [bits(score), id]).collect();
    words.resize(2 * k as usize, NO_ITEM);
    words
}

fn select_top(source: &mut Source, twist: Twist, [b, n, s, k]: [u32; 4], begins: bool, filter: Filter) -> Job {
    // After ids of earlier strips, and not word-aligned.
    let first_id = 2000 + source.rng.below(100) as u32;
    let scores = twisted(source, twist, b, n);
    let words = (first_id + n).div_ceil(32);
    let allowed: Vec<u32> = match filter {
        Filter::All | Filter::None => vec![0; words as usize],
        Filter::Half => (0..words).map(|_| source.rng.word()).collect(),
    };
    let is_allowed = |id: u32| filter == Filter::All || allowed[id as usize / 32] >> (id % 32) & 1 == 1;
    // Lists from earlier strips: full ones, and some with free places.
    let part = n.div_ceil(s);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for list in 0..b * s {
        let n_known = if source.rng.below(3) == 0 { source.rng.below(k as usize + 1) as u32 } else { k };
        let known = twisted(source, if twist == Twist::Ties { twist } else { Twist::None }, 1, n_known.max(1));
        let mut items: Vec<(f32, u32)> = known.into_iter().take(n_known as usize).zip(0..).collect();
        before.extend(best(items.clone(), k));
        if begins {
            items.clear();
        }
        let (row, begin) = ((list / s * n) as usize, list % s * part);
        let columns = (begin..(begin + part).min(n)).filter(|i| is_allowed(first_id + i));
        items.extend(columns.map(|i| (scores[row + i as usize], first_id + i)));
        after.extend(best(items, k));
    }
    let operands = vec![
        Operand::floats("scores", &[b, n], scores),
        Operand::words("allowed", &[words], allowed),
        Operand::words("lists", &[b, s, k, 2], before).becomes(Want::Exact(after)),
    ];
    Job::new(operands, move |rec, bound| {
        let allowed = (filter != Filter::All).then(|| bound.tensor(1));
        kernels::select_top(rec, bound.tensor(0), &TopStrip { first_id, begins, allowed }, bound.tensor(2))
    })
}

fn merge_top(source: &mut Source, twist: Twist, [b, s, k]: [u32; 3]) -> Job {
    let scores = twisted(source, twist, b, s * k);
    let (mut lists, mut merged) = (Vec::new(), Vec::new());
    for row in scores.chunks_exact((s * k) as usize) {
        let mut all = Vec::new();
        for (list, scores) in row.chunks_exact(k as usize).enumerate() {
            let n_known = if source.rng.below(3) == 0 { source.rng.below(k as usize + 1) } else { k as usize };
            // Ids of the lists interleave.
            let items: Vec<(f32, u32)> =
                scores.iter().copied().zip((list as u32..).step_by(s as usize)).take(n_known).collect();
            lists.extend(best(items.clone(), k));
            all.extend(items);
        }
        merged.extend(best(all, k));
    }
    let operands =
        vec![Operand::words("lists", &[b, s, k, 2], lists), Operand::exact_words("best", &[b, k, 2], merged)];
    Job::new(operands, |rec, bound| kernels::merge_top(rec, bound.tensor(0), bound.tensor(1)))
}
