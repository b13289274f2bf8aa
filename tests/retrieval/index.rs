//! `Index`: exact search on every executor, filters, deletion, files, and invalid input.

use std::ops::Range;

use tilewright::formats::Safetensors;
use tilewright::retrieval::Hit;
use tilewright::retrieval::index::{Bitset, Index, IndexLoader, IndexOptions, MAX_DIMS, Metric, Storage};
use tilewright::{Device, Error, Tier};
use web_time::Instant;

use crate::common::{self, Rng, block_on, shared};

/// The CPU and the adapter's tiers with different search kernels.
fn devices() -> Vec<Device> {
    let tiers = [Tier::Baseline, Tier::Subgroups, Tier::Scalar];
    shared::gpus_beside_cpu(tiers).into_iter().chain([common::cpu()]).collect()
}

fn options(metric: Metric, storage: Storage) -> IndexOptions {
    IndexOptions { metric, storage, ..IndexOptions::default() }
}

fn index_of(device: &Device, dims: u32, options: IndexOptions, vectors: &[f32]) -> Index {
    let mut index = Index::new(device, dims, options).expect("valid dimensions");
    let ids = block_on(index.append(vectors)).expect("valid vectors");
    assert_eq!(ids, 0..(vectors.len() / dims as usize) as u32);
    index
}

fn search(index: &Index, queries: &[f32], k: usize, filter: Option<&Bitset>) -> Vec<Vec<Hit>> {
    block_on(index.search(queries, k, filter)).expect("a valid search")
}

fn ids(hits: &[Hit]) -> Vec<u32> {
    hits.iter().map(|hit| hit.id).collect()
}

/// Small integers: all sums of their products are exact in any order.
fn whole(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.below(9) as f32 - 4.0).collect()
}

/// All allowed ids, best first.
fn sorted(vectors: &[f32], query: &[f32], is_allowed: impl Fn(u32) -> bool) -> Vec<Hit> {
    let dot = |vector: &[f32]| vector.iter().zip(query).map(|(a, b)| f64::from(a * b)).sum::<f64>() as f32;
    let hits = vectors.chunks_exact(query.len()).zip(0..).map(|(vector, id)| Hit { id, score: dot(vector) });
    let mut hits: Vec<Hit> = hits.filter(|hit| is_allowed(hit.id)).collect();
    hits.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.id.cmp(&b.id)));
    hits
}

/// 1,000,000 x 384 in half precision: every thousandth vector is the same, and the others have few distinct scores, so
/// most hits are tied.
#[test]
fn large_index_with_ties_ranks_like_the_cpu() {
    // More than fits in one binding.
    let n = if common::is_full() { 1_000_000 } else { 250_000 };
    const DIMS: usize = 384;
    const K: usize = 1000;
    let start = Instant::now();
    let mut vectors = vec![0i8; n * DIMS];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for eight in vectors.as_chunks_mut::<8>().0 {
        // xorshift64, Marsaglia 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *eight = state.to_le_bytes().map(|byte| (byte & 7) as i8 - 4);
    }
    let (first, rest) = vectors.split_at_mut(1000 * DIMS);
    rest.chunks_exact_mut(1000 * DIMS)
        .for_each(|thousand| thousand[7 * DIMS..8 * DIMS].copy_from_slice(&first[7 * DIMS..8 * DIMS]));

    // The repeated vector, and one that does not occur.
    let mut queries: Vec<f32> = vectors[7 * DIMS..8 * DIMS].iter().map(|&x| f32::from(x)).collect();
    queries.extend((0..DIMS).map(|i| (i % 3) as f32 - 1.0));
    let deleted: Vec<u32> = (0..n as u32).step_by(70).collect();
    let allowed = Bitset::from_fn(n as u32, |id| id % 3 != 1);
    let mut wanted = [vec![], vec![]];
    for (wanted, query) in wanted.iter_mut().zip(queries.chunks_exact(DIMS)) {
        let query: Vec<i32> = query.iter().map(|&x| x as i32).collect();
        let scores =
            vectors.chunks_exact(DIMS).map(|v| v.iter().zip(&query).map(|(&x, y)| i32::from(x) * y).sum::<i32>());
        let mut order: Vec<(i32, u32)> = scores.map(std::ops::Neg::neg).zip(0..).collect();
        order.sort_unstable();
        *wanted = order;
    }
    let best = |is_in: &dyn Fn(u32) -> bool| -> Vec<Vec<Hit>> {
        let hit = |&(score, id): &(i32, u32)| Hit { id, score: -score as f32 };
        wanted.iter().map(|order| order.iter().filter(|(_, id)| is_in(*id)).take(K).map(hit).collect()).collect()
    };
    let made = start.elapsed();
    for device in shared::executors() {
        let start = Instant::now();
        let mut index = Index::new(&device, DIMS as u32, options(Metric::Dot, Storage::F16)).expect("valid dimensions");
        for part in vectors.chunks(50_000 * DIMS) {
            let part: Vec<f32> = part.iter().map(|&x| f32::from(x)).collect();
            block_on(index.append(&part)).expect("valid vectors");
        }
        let appended = start.elapsed();
        let is_deleted = |id: u32| id.is_multiple_of(70);
        assert_eq!(search(&index, &queries, K, None), best(&|_| true), "{:?}", device.info());
        let searched = start.elapsed() - appended;
        index.delete(&deleted).expect("the vectors exist");
        assert_eq!(search(&index, &queries, K, None), best(&|id| !is_deleted(id)), "{:?}", device.info());
        let found = search(&index, &queries, K, Some(&allowed));
        assert_eq!(found, best(&|id| !is_deleted(id) && id % 3 != 1), "{:?}", device.info());
        let name = &device.info().name;
        println!(
            "{name}: vectors {made:.1?}, appended {appended:.1?}, first search {searched:.1?}, all {:.1?}",
            start.elapsed()
        );
    }
}

/// Numbers of vectors, queries and hits around each threshold, with vectors that end within a block.
#[test]
fn small_indices_rank_like_the_cpu() {
    for device in devices() {
        for (dims, n, batch, k, storage) in [
            (1, 1, 1, 1, Storage::F32),
            (3, 31, 2, 40, Storage::F16),
            (32, 1024, 1, 10, Storage::F32),
            (45, 1025, 8, 100, Storage::F16),
            (100, 2500, 33, 7, Storage::F32),
            (384, 5000, 5, 1024, Storage::F16),
        ] {
            let (vectors, queries) = (whole(n * dims, 1), whole(batch * dims, 2));
            let index = index_of(&device, dims as u32, options(Metric::Dot, storage), &vectors);
            assert_eq!((index.len(), index.n_ids(), index.dims()), (n as u32, n as u32, dims as u32));
            let found = search(&index, &queries, k, None);
            assert_eq!(found.len(), batch);
            for (found, query) in found.iter().zip(queries.chunks_exact(dims)) {
                let mut wanted = sorted(&vectors, query, |_| true);
                wanted.truncate(k);
                assert_eq!(*found, wanted, "{n} x {dims} for {batch} in {}", device.info().name);
            }
        }
        common::assert_tested(&device);
    }
}

/// Every storage and metric against f64: scores within the storage's rounding, in order, and no better hit omitted.
#[test]
fn index_scores_match_f64() {
    const DIMS: usize = 70;
    let mut rng = Rng::new(5);
    let mut numbers = |n: usize| -> Vec<f32> { (0..n * DIMS).map(|_| rng.normal() as f32).collect() };
    let (vectors, queries) = (numbers(1500), numbers(9));
    for device in devices() {
        for (metric, storage) in Metric::ALL.iter().flat_map(|&m| Storage::ALL.map(|s| (m, s))) {
            let index = index_of(&device, DIMS as u32, options(metric, storage), &vectors);
            let found = search(&index, &queries, 20, None);
            for (query, found) in queries.chunks_exact(DIMS).zip(&found) {
                let length = |v: &[f32]| v.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let dot = |v: &[f32]| v.iter().zip(query).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                let unit = |v: &[f32]| if metric == Metric::Cosine { length(v) * length(query) } else { 1.0 };
                let scores: Vec<f64> = vectors.chunks_exact(DIMS).map(|v| dot(v) / unit(v)).collect();
                // Relative to the sum of magnitudes: an f16 is off by 2^-11 of itself, a byte by half a 127th of its
                // block's largest number.
                let error = match storage {
                    Storage::F32 => 1e-6,
                    Storage::F16 => 1.0 / 2048.0,
                    Storage::Int8 => 0.02,
                };
                let reach =
                    |v: &[f32]| error * v.iter().zip(query).map(|(a, b)| f64::from(a * b).abs()).sum::<f64>() / unit(v);
                let reach = vectors.chunks_exact(DIMS).map(reach).fold(0.0, f64::max);
                assert_eq!(found.len(), 20);
                assert!(found.windows(2).all(|pair| pair[0].score >= pair[1].score));
                for hit in found {
                    let want = scores[hit.id as usize];
                    assert!((f64::from(hit.score) - want).abs() <= reach, "{hit:?}, expected {want} within {reach}");
                }
                let last = f64::from(found[19].score);
                let missed = (0..)
                    .zip(&scores)
                    .find(|(id, score)| **score > last + 2.0 * reach && found.iter().all(|h| h.id != *id));
                assert_eq!(missed, None, "{metric:?} {storage:?}");
            }
        }
    }
}

#[test]
fn index_appended_in_pieces_finds_like_the_whole() {
    let (dims, n) = (20, 6000);
    let (vectors, queries) = (whole(n * dims, 3), whole(3 * dims, 4));
    for device in devices() {
        for storage in Storage::ALL {
            let all = index_of(&device, dims as u32, options(Metric::Dot, storage), &vectors);
            let mut pieces = Index::new(&device, dims as u32, options(Metric::Dot, storage)).expect("valid dimensions");
            assert_eq!(search(&pieces, &queries, 5, None), vec![vec![]; 3], "nothing is in it");
            let mut end = 0;
            for part in [1, 1, 30, 993, 7, 2000, 2968] {
                let ids = block_on(pieces.append(&vectors[end * dims..(end + part) * dims])).expect("valid vectors");
                assert_eq!(ids, end as u32..(end + part) as u32);
                end += part;
                let alone = index_of(&device, dims as u32, options(Metric::Dot, storage), &vectors[..end * dims]);
                assert_eq!(
                    search(&pieces, &queries, 50, None),
                    search(&alone, &queries, 50, None),
                    "{end} in {storage:?}"
                );
            }
            assert_eq!(search(&pieces, &queries, 50, None), search(&all, &queries, 50, None), "{storage:?}");
            assert_eq!(block_on(pieces.append(&[])).expect("an empty append is valid"), n as u32..n as u32);
        }
    }
}

#[test]
fn filters_and_deletions_hide_vectors() {
    let (dims, n) = (16, 3000);
    let (vectors, query) = (whole(n * dims, 6), whole(dims, 7));
    for device in devices() {
        let mut index = index_of(&device, dims as u32, options(Metric::Dot, Storage::F32), &vectors);
        let odd = Bitset::from_fn(n as u32, |id| id % 2 == 1);
        let few = Bitset::from_fn(n as u32, |id| id % 1000 == 999);
        let mut gone: Vec<u32> = ids(&search(&index, &query, 100, None)[0]);
        gone.push(999);
        let is_gone = |id: u32| gone.contains(&id);
        assert_eq!(index.delete(&gone).expect("the vectors exist"), 101);
        assert_eq!(index.delete(&gone).expect("the vectors existed"), 0, "nothing is left to delete");
        assert_eq!((index.len(), index.n_ids()), (n as u32 - 101, n as u32));
        assert!(index.contains(2999) != is_gone(2999) && !index.contains(999) && !index.contains(n as u32));
        let all = |is_in: &dyn Fn(u32) -> bool| sorted(&vectors, &query, |id| !is_gone(id) && is_in(id));
        assert_eq!(search(&index, &query, 70, None)[0], all(&|_| true)[..70]);
        assert_eq!(search(&index, &query, 70, Some(&odd))[0], all(&|id| id % 2 == 1)[..70]);
        assert_eq!(search(&index, &query, 70, Some(&few))[0], all(&|id| id % 1000 == 999), "fewer than asked for");
        assert_eq!(search(&index, &query, 70, Some(&Bitset::new(n as u32)))[0], [], "none is allowed");
        // Deleted ids are not reused.
        assert_eq!(block_on(index.append(&query)).expect("a valid vector"), n as u32..n as u32 + 1);
        index.delete(&(0..=n as u32).collect::<Vec<_>>()).expect("the vectors existed");
        assert!(index.is_empty() && search(&index, &query, 3, None)[0].is_empty());
    }
}

/// A search is one submission and one read, and a repeated search creates nothing.
#[test]
fn repeated_index_search_creates_nothing_new() {
    let Some(device) = common::gpu(None) else { return };
    let (vectors, queries) = (whole(3000 * 64, 8), whole(8 * 64, 9));
    let mut index = index_of(&device, 64, options(Metric::Cosine, Storage::F16), &vectors);
    let filter = Bitset::from_fn(3000, |id| id % 5 > 0);
    for filter in [None, Some(&filter)] {
        search(&index, &queries, 10, filter);
        let before = device.counters();
        // Numbers of queries and hits that round up to the same sizes.
        search(&index, &queries[..64 * 7], 16, filter);
        let did = device.counters() - before;
        assert_eq!((did.submits, did.bytes_read), (1, 8 * 16 * 8));
        assert_eq!((did.pipelines_created, did.bind_groups_created, did.buffers_created), (0, 0, 0));
    }
    // Nor does appending within capacity, or deletion.
    let before = device.counters();
    block_on(index.append(&vectors[..64])).expect("a valid vector");
    index.delete(&[0, 1]).expect("the vectors exist");
    search(&index, &queries, 10, None);
    let did = device.counters() - before;
    assert_eq!((did.pipelines_created, did.bind_groups_created, did.buffers_created), (0, 0, 0));
}

#[test]
fn concurrent_index_searches_do_not_interfere() {
    for device in devices() {
        let (vectors, queries) = (whole(2000 * 8, 10), whole(2 * 8, 11));
        let index = index_of(&device, 8, options(Metric::Dot, Storage::F32), &vectors);
        let filters = [1, 2].map(|rest| Bitset::from_fn(2000, move |id| id % 3 == rest));
        let mut searches: Vec<_> =
            (0..2).map(|i| Box::pin(index.search(&queries[i * 8..][..8], 9, Some(&filters[i])))).collect();
        // Both start before either is awaited.
        let waker = std::task::Waker::noop();
        let polled: Vec<_> =
            searches.iter_mut().map(|s| s.as_mut().poll(&mut std::task::Context::from_waker(waker))).collect();
        for (i, (polled, search)) in polled.into_iter().zip(searches).enumerate() {
            let found = match polled {
                std::task::Poll::Ready(found) => found,
                std::task::Poll::Pending => block_on(search),
            };
            let wanted = sorted(&vectors, &queries[i * 8..][..8], |id| id % 3 == i as u32 + 1);
            assert_eq!(found.expect("a valid search")[0], wanted[..9]);
        }
    }
}

/// The index's error.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Index { field, found, .. }) => format!("{field}: {found}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn invalid_vectors_are_refused_by_record() {
    let device = common::cpu();
    for (dims, found) in [(0, "dims: 0".to_string()), (MAX_DIMS + 1, format!("dims: {}", MAX_DIMS + 1))] {
        assert_eq!(refused(Index::new(&device, dims, IndexOptions::default())), found);
    }
    let mut index = index_of(&device, 3, options(Metric::Cosine, Storage::F32), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let with = |at: usize, value: f32| {
        let mut vectors = vec![1.0; 12];
        vectors[at] = value;
        vectors
    };
    for (vectors, found) in [
        (vec![1.0; 7], "record 2: 1 numbers"),
        (with(7, f32::NAN), "record 2: NaN in column 1"),
        (with(0, f32::INFINITY), "record 0: inf in column 0"),
        (with(11, f32::NEG_INFINITY), "record 3: -inf in column 2"),
        (vec![1.0, 1.0, 1.0, 0.0, 0.0, 0.0], "record 1: zero"),
    ] {
        assert_eq!(refused(block_on(index.append(&vectors))), found);
        let query = found.replace("record", "query");
        assert_eq!(refused(block_on(index.search(&vectors, 1, None))), query);
    }
    for (storage, largest) in [(Storage::F16, 65504.0), (Storage::Int8, 65504.0 * 127.0)] {
        let mut index = index_of(&device, 2, options(Metric::Dot, storage), &[largest, 0.0]);
        let found = refused(block_on(index.append(&[0.0, 0.0, 1.0, -1.001 * largest])));
        assert!(found.starts_with("record 1: one of magnitude"), "{found}");
        let tiny = block_on(index.append(&[1e-30, 0.0])).expect("normalises to zero");
        assert_eq!(
            search(&index, &[1.0, 1.0], 2, None)[0],
            [Hit { id: 0, score: largest }, Hit { id: tiny.start, score: 0.0 }]
        );
    }
    // A refused call changes nothing.
    assert_eq!((index.len(), index.n_ids()), (2, 2));
    assert_eq!(refused(index.delete(&[1, 2])), "id: 2");
    assert_eq!(index.len(), 2);
    assert_eq!(refused(block_on(index.search(&[1.0, 1.0, 1.0], 1, Some(&Bitset::new(3))))), "filter: 3");
    for k in [0, 1025] {
        let error = block_on(index.search(&[1.0, 1.0, 1.0], k, None)).expect_err("out of range");
        assert!(matches!(error, Error::Option { option: "k", .. }), "{error}");
    }
    let named = IndexOptions { model: Some("minilm".into()), ..IndexOptions::default() };
    let named = Index::new(&device, 3, named).expect("valid dimensions");
    named.expect_model("minilm", 3).expect("the model matches");
    assert_eq!(refused(named.expect_model("minilm", 4)), "dims: 3");
    assert_eq!(refused(named.expect_model("other", 3)), "model: `minilm`");
    assert_eq!(refused(index.expect_model("minilm", 3)), "model: none");
    assert_eq!(Error::Index { field: "f".into(), expected: "e".into(), found: "o".into() }.code(), "index");
}

/// A sum of finite products may overflow f32; the error names the record instead of ranking it first.
#[test]
fn non_finite_score_is_an_error_that_names_its_record() {
    for device in devices() {
        let index =
            index_of(&device, 2, options(Metric::Dot, Storage::F32), &[1.0, 1.0, 2.0, 3e38, 3.0, 3.0, 3e38, 3e38]);
        for queries in [[2e38, 1.0], [-1e30, -1e30]] {
            assert_eq!(refused(block_on(index.search(&queries, 1, None))), "score of record 1: NaN or infinite");
        }
        let allowed = Bitset::from_fn(4, |id| id % 2 == 0);
        assert_eq!(ids(&search(&index, &[1e30, 1e30], 2, Some(&allowed))[0]), [2, 0]);
    }
}

fn described(metric: Metric, storage: Storage) -> IndexOptions {
    IndexOptions { metric, storage, model: Some("a \"model\"\n".into()), pooling: Some("mean".into()) }
}

#[test]
fn saved_index_reloads_byte_equal() {
    let folder = std::env::temp_dir().join(format!("tilewright-index-{}", std::process::id()));
    for device in devices() {
        for (metric, storage) in Metric::ALL.iter().flat_map(|&m| Storage::ALL.map(|s| (m, s))) {
            for [dims, n] in [[1, 1], [45, 40], [64, 2500]] {
                let vectors: Vec<f32> = common::uniform(n * dims, 12);
                let mut index = index_of(&device, dims as u32, described(metric, storage), &vectors);
                index.delete(&[n as u32 / 2]).expect("the vector exists");
                let path = folder.join("folder").join("index.safetensors");
                block_on(index.save(&path)).expect("the folder is writable");
                let bytes = std::fs::read(&path).expect("the file was written");
                assert!(block_on(index.to_bytes()).expect("readable") == bytes, "both ways are the same");
                let mut loaded = block_on(Index::load(&device, &path)).expect("just written");
                assert!(block_on(loaded.to_bytes()).expect("readable") == bytes, "{n} x {dims} {metric:?} {storage:?}");
                assert_eq!((loaded.options(), loaded.dims()), (index.options(), index.dims()));
                let found = search(&index, &vectors[..dims], 30, None);
                assert_eq!(search(&loaded, &vectors[..dims], 30, None), found);
                // Both behave alike afterwards.
                for index in [&mut index, &mut loaded] {
                    block_on(index.append(&vectors)).expect("valid vectors");
                    index.delete(&[0, n as u32]).expect("the vectors exist");
                }
                assert_eq!(search(&loaded, &vectors[..dims], 30, None), search(&index, &vectors[..dims], 30, None));
                assert!(block_on(loaded.to_bytes()).ok() == block_on(index.to_bytes()).ok());
            }
        }
        let empty = Index::new(&device, 7, IndexOptions::default()).expect("valid dimensions");
        let bytes = block_on(empty.to_bytes()).expect("an empty index is readable");
        let empty = block_on(Index::from_bytes(&device, &bytes)).expect("just written");
        assert_eq!((empty.n_ids(), empty.dims()), (0, 7));
    }
    let left: Vec<_> = std::fs::read_dir(folder.join("folder")).expect("the folder exists").collect();
    assert_eq!(left.len(), 1, "only the file itself is left");
    let error = block_on(Index::load(&common::cpu(), folder.join("none"))).expect_err("no such file");
    assert!(matches!(error, Error::Io { .. }), "{error}");
    std::fs::write(folder.join("bad"), b"none").expect("the folder is writable");
    let error = block_on(Index::load(&common::cpu(), folder.join("bad"))).expect_err("no index");
    assert!(matches!(error, Error::InFile { .. }), "{error}");
    std::fs::remove_dir_all(&folder).expect("the folder exists");
}

/// A tensor's data range in a file, by the header.
fn data(bytes: &[u8], name: &str) -> Range<usize> {
    let header = Safetensors::parse(bytes, bytes.len() as u64).expect("a valid file");
    let range = header.tensor(name).expect("the tensor exists").range();
    range.start as usize..range.end as usize
}

/// Reads a file that arrives in pieces of `at_once` bytes, with known or unknown length.
fn arrived(device: &Device, bytes: &[u8], at_once: usize, len: Option<u64>) -> Result<Index, Error> {
    let mut loader = IndexLoader::new(device, len);
    let mut last = 0;
    while let Some(start) = loader.wanted() {
        assert!(start >= last, "offsets only grow");
        last = start;
        let rest = &bytes[start as usize..];
        if rest.is_empty() {
            loader.end()?;
        }
        block_on(loader.push(&rest[..rest.len().min(at_once)]))?;
    }
    loader.finish()
}

#[test]
fn index_file_is_read_and_written_in_pieces() {
    for device in devices() {
        for (metric, storage) in Metric::ALL.iter().flat_map(|&m| Storage::ALL.map(|s| (m, s))) {
            let vectors: Vec<f32> = common::uniform(40 * 45, 15);
            let mut index = index_of(&device, 45, described(metric, storage), &vectors);
            index.delete(&[7]).expect("the vector exists");
            let bytes = block_on(index.to_bytes()).expect("readable");
            if (metric, storage) == (Metric::Dot, Storage::F32) {
                assert_eq!(bytes[data(&bytes, "vectors")], *bytemuck::cast_slice::<f32, u8>(&vectors));
            }
            for at_once in [1, 7, 1000, usize::MAX] {
                for len in [Some(bytes.len() as u64), None] {
                    let index = arrived(&device, &bytes, at_once, len).expect("just written");
                    let name = format!("{metric:?} {storage:?} {at_once} {len:?}");
                    assert!(block_on(index.to_bytes()).expect("readable") == bytes, "{name}");
                }
            }
            for end in [3, 100, data(&bytes, "vectors").start + 50, bytes.len() - 1] {
                let error = arrived(&device, &bytes[..end], 64, None).expect_err("it was cut off");
                assert!(matches!(error, Error::Truncated { .. } | Error::Format { .. }), "{error}");
            }

            // Vectors appended during the save are not part of it.
            let mut saving = index.saving().expect("readable");
            assert_eq!(saving.size_bytes(), bytes.len() as u64);
            block_on(index.append(&vectors)).expect("valid vectors");
            let mut written = Vec::new();
            while let Some(piece) = block_on(saving.next()).expect("readable") {
                written.extend(piece);
            }
            assert!(written == bytes, "{metric:?} {storage:?}");
        }
        // More rows than fit in a piece, across shards.
        let vectors: Vec<f32> = common::uniform(5000 * 512, 16);
        let index = index_of(&device, 512, options(Metric::Dot, Storage::F32), &vectors);
        let mut saving = index.saving().expect("readable");
        let mut pieces = Vec::new();
        while let Some(piece) = block_on(saving.next()).expect("readable") {
            pieces.push(piece);
        }
        assert!(pieces.iter().all(|piece| piece.len() <= 4 << 20), "pieces are small");
        let written = pieces.concat();
        assert!(written[data(&written, "vectors")] == *bytemuck::cast_slice::<f32, u8>(&vectors));
    }
}

/// Other programs may order tensors differently.
#[test]
fn scales_may_come_before_their_vectors() {
    let device = common::cpu();
    let vectors: Vec<f32> = common::uniform(40 * 45, 17);
    let index = index_of(&device, 45, described(Metric::Cosine, Storage::Int8), &vectors);
    let good = block_on(index.to_bytes()).expect("readable");
    let header = Safetensors::parse(&good, good.len() as u64).expect("a valid file");
    let names = ["scales", "vectors", "live"];
    let tensors = names.map(|name| header.tensor(name).expect("the tensor exists"));
    let metadata = header.metadata.iter().map(|(key, text)| (key.as_str(), text.as_str()));
    let layout = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.block_type, tensor.shape.as_slice()));
    let mut bytes = Safetensors::head(metadata, layout);
    names.iter().for_each(|name| bytes.extend_from_slice(&good[data(&good, name)]));
    for at_once in [5, usize::MAX] {
        let index = arrived(&device, &bytes, at_once, None).expect("a valid file");
        assert!(block_on(index.to_bytes()).expect("readable") == good);
    }
    // A scale of 2, and an incremented byte.
    let (scale, byte) = (data(&bytes, "scales").start + (3 * 2 + 1) * 2, data(&bytes, "vectors").start + 4 * 45);
    for (at, change, record) in [(scale, &0x4000u16.to_le_bytes()[..], 3), (byte, &[127, 127, 127, 127, 127, 127], 4)] {
        let mut bytes = bytes.clone();
        bytes[at..at + change.len()].copy_from_slice(change);
        let start = data(&bytes, "vectors").start + record * 45;
        match block_on(Index::from_bytes(&device, &bytes)) {
            Err(Error::Format { field, offset, .. }) => {
                assert_eq!((field, offset as usize), (format!("record {record}"), start));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn malformed_index_files_are_refused_by_field() {
    let device = common::cpu();
    let vectors: Vec<f32> = common::uniform(40 * 45, 13);
    let file = |storage| {
        let index = index_of(&device, 45, described(Metric::Cosine, storage), &vectors);
        block_on(index.to_bytes()).expect("readable")
    };
    let fault = |bytes: &[u8]| match block_on(Index::from_bytes(&device, bytes)) {
        Err(Error::Format { format, field, offset, .. }) => (format, field, offset as usize),
        Err(Error::Unsupported { format, field, .. }) => (format, field, 0),
        other => panic!("{other:?}"),
    };
    for storage in Storage::ALL {
        let good = file(storage);
        let (vectors, live) = (data(&good, "vectors"), data(&good, "live"));
        let number_bytes = vectors.len() / (40 * 45);
        let broken = |at: usize, word: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + word.len()].copy_from_slice(word);
            fault(&bytes)
        };
        // Record 3, column 2: not a number, or so large that the norm is no longer 1.
        let (record, at) = (vectors.start + 3 * 45 * number_bytes, vectors.start + (3 * 45 + 2) * number_bytes);
        match storage {
            Storage::F32 => {
                assert_eq!(broken(at, &f32::NAN.to_le_bytes()), ("index", "record 3".into(), at));
                assert_eq!(broken(at, &2f32.to_le_bytes()), ("index", "record 3".into(), record));
            }
            Storage::F16 => {
                assert_eq!(broken(at, &0x7c00u16.to_le_bytes()), ("index", "record 3".into(), at));
                assert_eq!(broken(at, &0x4000u16.to_le_bytes()), ("index", "record 3".into(), record));
            }
            Storage::Int8 => {
                let at = data(&good, "scales").start + (3 * 2 + 1) * 2;
                assert_eq!(broken(at, &0x7e00u16.to_le_bytes()), ("index", "scale 1 of record 3".into(), at));
                assert_eq!(broken(at, &0x4000u16.to_le_bytes()), ("index", "record 3".into(), record));
            }
        }
        // 40 vectors leave 24 unused bits in the second word.
        assert_eq!(broken(live.end - 3, &[1]), ("index", "live".into(), live.end - 4));
        // A header with other texts of equal length.
        for (text, other, field) in [
            ("tilewright index", "tilewright INDEX", "format"),
            ("\"version\":\"1\"", "\"version\":\"2\"", "version"),
            ("\"version\"", "\"Version\"", "version"),
            ("\"cosine\"", "\"COSINE\"", "metric"),
            ("\"dims\":\"45\"", "\"dims\":\"00\"", "dims"),
            ("\"dims\":\"45\"", "\"dims\":\"44\"", "vectors"),
            ("\"count\":\"40\"", "\"count\":\"4x\"", "count"),
            ("\"count\":\"40\"", "\"count\":\"41\"", "vectors"),
            ("\"count\":\"40\"", "\"count\":\"99\"", "live"),
            ("\"vectors\"", "\"Vectors\"", "tensor"),
        ] {
            let header = String::from_utf8_lossy(&good[..live.start]);
            let at = header.find(text).unwrap_or_else(|| panic!("{text} in {header}"));
            // The length prefix is not text, so search the bytes.
            let at = (0..=at).find(|&at| good[at..].starts_with(text.as_bytes())).expect("the text occurs");
            let (format, found, _) = broken(at, other.as_bytes());
            assert_eq!((format, found.as_str()), ("index", field), "{other}");
        }
        for end in [0, 7, 8, 100, live.start, vectors.start, good.len() - 1] {
            assert_eq!(fault(&good[..end]).0, "safetensors", "{end} bytes");
        }
        // Any other change: an error or an index, and no panic.
        let mut rng = Rng::new(14);
        for _ in 0..3000 {
            let mut bytes = good.clone();
            let at = if rng.below(2) == 0 { rng.below(live.end) } else { rng.below(bytes.len()) };
            bytes[at] = rng.word() as u8;
            if let Ok(index) = block_on(Index::from_bytes(&device, &bytes)) {
                assert_eq!(index.n_ids(), 40);
            }
        }
    }
}
