//! Logits after each of the given tokens, `Session::logits_of_all`.

use tilewright::generate::LogitRows;
use tilewright::load::ModelFile;
use tilewright::{Device, LoadOptions, Model};

fn builtin(max_pass: u32) -> Model {
    let options = LoadOptions { max_pass: Some(max_pass), ..LoadOptions::default() };
    Model::from_file(&Device::cpu(), ModelFile::builtin().unwrap(), options).unwrap()
}

/// Rows of passes of any size against one pass over all tokens.
#[test]
fn logits_of_all_tokens_match_one_pass_however_they_are_cut() {
    let model = builtin(32);
    let ids: Vec<u32> = (0..150u32).map(|i| 3 + i.wrapping_mul(2_654_435_761) % 500).collect();
    let vocab_size = model.config().vocab_size as usize;
    let all = pollster::block_on(model.trace(&ids)).unwrap().logits;
    let expected: Vec<&[f32]> = all.chunks_exact(vocab_size).collect();
    for (n_before, first) in [(0, 0), (0, 77), (40, 0), (40, 33), (149, 0), (149, 1)] {
        let mut session = model.session().unwrap();
        if n_before > 0 {
            pollster::block_on(session.logits(&ids[..n_before])).unwrap();
        }
        let mut next = first;
        let mut check = |rows: LogitRows<'_>| {
            for (i, row) in rows.iter() {
                assert_eq!(i, next);
                next += 1;
                let is_near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-3;
                assert!(row.iter().zip(expected[n_before + i]).all(is_near), "row {i} after {n_before}");
            }
            Ok(())
        };
        pollster::block_on(session.logits_of_all(&ids[n_before..], first, &mut check)).unwrap();
        assert_eq!((next, session.tokens()), (ids.len() - n_before, &ids[..]));
    }
}
