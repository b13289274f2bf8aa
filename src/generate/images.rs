//! Images in a sequence: which rows stand where, and what positions they take.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Error;
use crate::vision::{FIRST_ROW_ID, ImageRows};

/// The images of a sequence, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlacedImages(Vec<PlacedImage>);

#[derive(Clone, Debug)]
struct PlacedImage {
    /// Position of its first row.
    start: usize,
    rows: Arc<ImageRows>,
}

/// The next tokens of a sequence that one pass may take: tokens, or rows of an image.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Number of tokens or rows.
    pub n: usize,
    /// The image, and which of its rows come next.
    pub image: Option<(Arc<ImageRows>, usize)>,
}

impl PlacedImage {
    fn end(&self) -> usize {
        self.start + self.rows.len()
    }
}

/// Whether an id stands for a row of an image.
pub(crate) fn is_row(id: u32) -> bool {
    id >= FIRST_ROW_ID
}

/// The image whose rows begin at the first of these ids.
///
/// # Errors
/// [`Error::Tokenizer`] for an id of no listed image, and for a part of one.
pub(crate) fn image_at<'a>(ids: &[u32], images: &'a [Arc<ImageRows>]) -> Result<&'a Arc<ImageRows>, Error> {
    let wrong = |found: String| Error::Tokenizer {
        field: "prompt".into(),
        expected: "token ids, and ids of all rows of images that come with the prompt".into(),
        found,
    };
    let Some(&first) = ids.first() else { return Err(wrong("no id".into())) };
    let found = images.iter().find(|image| image.ids.start == first && !image.is_empty());
    let image = found.ok_or_else(|| wrong(format!("the id {first}")))?;
    let is_whole = ids.len() >= image.len() && ids.iter().zip(image.ids.clone()).all(|(id, row)| *id == row);
    if is_whole { Ok(image) } else { Err(wrong("a part of an image".into())) }
}

impl PlacedImages {
    /// Adds the images among these ids, the sequence's from `start` on. All are whole, as [`check_images`] has checked.
    pub fn add(&mut self, start: usize, ids: &[u32], images: &[Arc<ImageRows>]) {
        let mut at = 0;
        while let Some(next) = ids[at..].iter().position(|&id| is_row(id)) {
            at += next;
            let Ok(rows) = image_at(&ids[at..], images) else { return };
            self.0.push(PlacedImage { start: start + at, rows: rows.clone() });
            at += rows.len();
        }
    }

    /// Keeps the images that end by position `n`. Returns the start of the first other one, if that is before `n`.
    pub fn truncate(&mut self, n: usize) -> usize {
        let cut = self.0.iter().find(|image| image.end() > n).map_or(n, |image| image.start.min(n));
        self.0.retain(|image| image.end() <= n);
        cut
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The images, without their places.
    pub fn images(&self) -> Vec<Arc<ImageRows>> {
        self.0.iter().map(|image| image.rows.clone()).collect()
    }

    /// The tokens or rows at a position that one pass may take, of `n` more tokens.
    pub fn run_at(&self, position: usize, n: usize) -> Run {
        let next = self.0.iter().find(|image| image.end() > position);
        match next {
            Some(image) if image.start <= position => {
                Run { n: n.min(image.end() - position), image: Some((image.rows.clone(), position - image.start)) }
            }
            Some(image) => Run { n: n.min(image.start - position), image: None },
            None => Run { n, image: None },
        }
    }

    /// By how much the RoPE table's row for a token at this position is above the position, modulo 2^32: below it, after
    /// images that take fewer positions than rows.
    pub fn rope_shift(&self, position: usize) -> u32 {
        let before = self.0.iter().take_while(|image| image.end() <= position);
        before
            .fold(0, |shift, image| shift.wrapping_add(image.rows.n_positions()).wrapping_sub(image.rows.len() as u32))
    }

    /// Time, row and column of these rows of the image at a position of its first row.
    pub fn positions(&self, image: &ImageRows, first_position: usize, rows: Range<usize>) -> Vec<[u32; 3]> {
        let Some([_, cols]) = image.grid else { return Vec::new() };
        let start = (first_position as u32).wrapping_add(self.rope_shift(first_position));
        rows.map(|row| [start, start + row as u32 / cols, start + row as u32 % cols]).collect()
    }
}

/// Refuses ids of images that are not listed or not whole, and an image at the end.
///
/// # Errors
/// [`Error::Tokenizer`].
pub(crate) fn check_images(ids: &[u32], images: &[Arc<ImageRows>]) -> Result<(), Error> {
    let mut at = 0;
    while let Some(next) = ids[at..].iter().position(|&id| is_row(id)) {
        at += next;
        at += image_at(&ids[at..], images)?.len();
    }
    match ids.last() {
        Some(&id) if is_row(id) => Err(Error::Tokenizer {
            field: "prompt".into(),
            expected: "a token after the last image".into(),
            found: "an image at the end".into(),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::safetensors::Safetensors;
    use crate::model::RowAttention;

    fn image(first: u32, grid: [u32; 2]) -> Arc<ImageRows> {
        let n = grid[0] * grid[1];
        let (rows, grid, ids) = (vec![vec![0.0; n as usize]], Some(grid), first..first + n);
        Arc::new(ImageRows { dim: 1, rows, grid, attention: RowAttention::ByLayer, ids })
    }

    #[test]
    fn images_take_fewer_positions_than_rows() {
        let (a, b) = (image(FIRST_ROW_ID, [3, 4]), image(FIRST_ROW_ID + 12, [2, 2]));
        let ids: Vec<u32> = [vec![1, 2], a.ids.clone().collect(), vec![3], b.ids.clone().collect(), vec![4]].concat();
        let images = [a.clone(), b.clone()];
        check_images(&ids, &images).unwrap();
        let mut placed = PlacedImages::default();
        placed.add(0, &ids, &images);
        // As Qwen2-VL's published rule: after an image comes the largest position so far, plus one.
        let shifts = [0, 2, 14, 15, 19].map(|position| placed.rope_shift(position) as i32);
        assert_eq!(shifts, [0, 0, 4 - 12, 4 - 12, 4 - 12 + 2 - 4]);
        let runs = [0, 2, 10, 14, 15, 19].map(|position| {
            let run = placed.run_at(position, ids.len() - position);
            (run.n, run.image.map(|(rows, first)| (rows.ids.start, first)))
        });
        let expected = [
            (2, None),
            (12, Some((a.ids.start, 0))),
            (4, Some((a.ids.start, 8))),
            (1, None),
            (4, Some((b.ids.start, 0))),
        ];
        assert_eq!(runs[..5], expected);
        assert_eq!(placed.positions(&a, 2, 4..6), [[2, 3, 2], [2, 3, 3]]);
        assert_eq!(placed.positions(&b, 15, 3..4), [[7, 8, 8]]);
        for (ids, images) in [(&ids[..10], &images[..]), (&ids[3..], &images[..]), (&ids[..], &images[..1])] {
            assert!(check_images(ids, images).is_err(), "{ids:?}");
        }
        assert!(check_images(&ids[..19], &images).is_err(), "an image at the end");
        assert_eq!([20, 19, 17, 14, 3].map(|n| placed.truncate(n)), [20, 19, 15, 14, 2]);
        assert!(placed.is_empty());
    }

    /// Positions of a text with two pictures, by `get_rope_index` of transformers 5.24.
    #[test]
    fn positions_are_those_of_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-random-pictures/qwen3-vl/refs.safetensors");
        let file = std::fs::read(path).unwrap();
        let header = Safetensors::parse(&file, file.len() as u64).unwrap();
        let numbers = |name: &str| -> Vec<u32> {
            bytemuck::pod_collect_to_vec(header.tensor(name).unwrap().bytes(&file).unwrap())
        };
        let (ids, want) = (numbers("2.ids"), numbers("2.position_ids"));
        let mut first = FIRST_ROW_ID;
        let images: Vec<_> = numbers("2.image_grid_thw")
            .chunks_exact(3)
            .map(|grid| {
                let image = image(first, [grid[1] / 2, grid[2] / 2]);
                first = image.ids.end;
                image
            })
            .collect();
        let mut rows = FIRST_ROW_ID..;
        let ids: Vec<u32> = ids.iter().map(|&id| if id == 287 { rows.next().unwrap() } else { id }).collect();
        let mut placed = PlacedImages::default();
        placed.add(0, &ids, &images);
        let got = (0..ids.len()).map(|position| match placed.run_at(position, 1).image {
            Some((image, row)) => placed.positions(&image, position - row, row..row + 1)[0],
            None => [(position as u32).wrapping_add(placed.rope_shift(position)); 3],
        });
        let want = (0..ids.len()).map(|at| [0, 1, 2].map(|axis| want[axis * ids.len() + at]));
        assert!(got.eq(want));
    }
}
