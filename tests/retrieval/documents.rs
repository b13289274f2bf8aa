//! `DocumentIndex`: exact search by late interaction on every executor, and invalid input.

use tilewright::retrieval::Hit;
use tilewright::retrieval::index::{Bitset, DocumentIndex, IndexOptions, Metric, Storage};
use tilewright::{Device, Error, Tier};

use crate::common::{self, Rng, block_on, shared};

const DIMS: usize = 40;

fn options(storage: Storage) -> IndexOptions {
    IndexOptions { metric: Metric::Dot, storage, ..IndexOptions::default() }
}

/// Small integers: all sums of their products are exact in any order.
fn whole(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.below(9) as f32 - 4.0).collect()
}

/// All allowed documents, best first.
fn sorted(documents: &[Vec<f32>], query: &[f32], is_allowed: impl Fn(u32) -> bool) -> Vec<Hit> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let score = |document: &Vec<f32>| -> f64 {
        let best = |token: &[f32]| document.chunks(DIMS).map(|other| dot(token, other)).fold(f64::MIN, f64::max);
        query.chunks(DIMS).map(best).sum()
    };
    let hits = documents.iter().zip(0..).map(|(document, id)| Hit { id, score: score(document) as f32 });
    let mut hits: Vec<Hit> = hits.filter(|hit| is_allowed(hit.id)).collect();
    hits.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.id.cmp(&b.id)));
    hits
}

fn devices() -> Vec<Device> {
    shared::gpus_beside_cpu([Tier::Baseline, Tier::Subgroups, Tier::Scalar])
        .into_iter()
        .chain([common::cpu()])
        .collect()
}

#[test]
fn documents_rank_like_a_plain_loop_across_shards() {
    for device in devices() {
        for storage in [Storage::F32, Storage::F16] {
            let mut rng = Rng::new(8);
            let mut index = DocumentIndex::new(&device, DIMS as u32, options(storage)).unwrap();
            let mut documents: Vec<Vec<f32>> = Vec::new();
            // 1024 rows in the first shard: documents meet its end, and one is larger.
            for n in [9, 30, 1] {
                let lengths: Vec<u32> = (0..n).map(|i| if n == 1 { 1300 } else { 1 + 37 * i % 90 }).collect();
                let some: Vec<Vec<f32>> = lengths.iter().map(|&len| whole(&mut rng, len as usize * DIMS)).collect();
                let first = documents.len() as u32;
                assert_eq!(block_on(index.append(&some.concat(), &lengths)).unwrap(), first..first + n);
                documents.extend(some);
                for n_tokens in [1, 7, 33] {
                    let query = whole(&mut rng, n_tokens * DIMS);
                    let found = block_on(index.search(&query, 12, None)).unwrap();
                    assert_eq!(found, sorted(&documents, &query, |_| true)[..found.len()], "{storage:?}");
                    assert_eq!(found.len(), documents.len().min(12));
                }
            }
            assert_eq!(index.delete(&[3, 17, 3]).unwrap(), 2);
            let filter = Bitset::from_fn(index.n_ids(), |id| id % 3 != 1);
            let query = whole(&mut rng, 5 * DIMS);
            for _ in 0..2 {
                let found = block_on(index.search(&query, 100, Some(&filter))).unwrap();
                assert_eq!(found, sorted(&documents, &query, |id| id % 3 != 1 && id != 3 && id != 17), "{storage:?}");
                let found = block_on(index.search(&query, 100, None)).unwrap();
                assert_eq!(found, sorted(&documents, &query, |id| id != 3 && id != 17), "{storage:?}");
            }
            assert_eq!((index.len(), index.n_ids()), (38, 40));
        }
        common::assert_tested(&device);
    }
}

#[test]
fn invalid_documents_are_refused_by_name() {
    fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
        match result.unwrap_err() {
            Error::Index { field, found, .. } => format!("{field}: {found}"),
            other => panic!("{other}"),
        }
    }
    let device = common::cpu();
    let mut index = DocumentIndex::new(&device, 2, IndexOptions::default()).unwrap();
    assert!(block_on(index.search(&[1.0, 0.0], 3, None)).unwrap().is_empty());
    assert_eq!(block_on(index.append(&[1.0, 0.0, 0.0, 2.0], &[2])).unwrap(), 0..1);
    let mut append = |vectors: &[f32], lengths: &[u32]| refused(block_on(index.append(vectors, lengths)));
    assert_eq!(append(&[1.0, 0.0, 1.0], &[1]), "token 1: 1 numbers");
    assert_eq!(append(&[1.0, 0.0, f32::NAN, 1.0], &[2]), "token 1: NaN in column 0");
    assert_eq!(append(&[1.0, 0.0, 0.0, 0.0], &[2]), "token 1: zero");
    assert_eq!(append(&[1.0, 0.0], &[1, 0]), "document 1: 0");
    assert_eq!(append(&[1.0, 0.0], &[2]), "lengths: 2");
    assert_eq!(append(&[1.0, 0.0, 1.0, 1.0], &[1]), "lengths: 1");
    assert_eq!(append(&[1.0, 0.0], &[1 << 30]), format!("document 0: {}", 1 << 30));
    assert_eq!((index.len(), index.n_ids()), (1, 1));
    assert_eq!(refused(block_on(index.search(&[], 1, None))), "query: none");
    assert_eq!(refused(block_on(index.search(&[0.0, 0.0], 1, None))), "query token 0: zero");
    assert_eq!(refused(block_on(index.search(&[1.0, 1.0], 1, Some(&Bitset::new(2))))), "filter: 2");
    assert_eq!(refused(index.delete(&[0, 1])), "id: 1");
    let found = block_on(index.search(&[1.0, 0.0, 0.0, 1.0], 1, None)).unwrap();
    assert!((found[0].score - 2.0).abs() < 1e-6, "{found:?}");
}
