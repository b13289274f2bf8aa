//! Penalties, logit biases, log-probabilities and beam search, against plain loops over logits recomputed for each
//! token.

use std::collections::BTreeMap;

use tilewright::generate::{Beam, BeamOptions};
use tilewright::{Device, Error, GenerateOptions, Model};

use super::common::shared::executors;
use super::common::{self, block_on};
use super::{builtin, collect, endless};

const PROMPT: [u32; 4] = [1, 40, 41, 42];

/// Logits after these tokens, in a new session.
fn logits(model: &Model, ids: &[u32]) -> Vec<f64> {
    let logits = block_on(model.session().unwrap().logits(ids)).unwrap();
    logits.into_iter().map(f64::from).collect()
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - highest).exp()).sum();
    logits.iter().map(|logit| logit - highest - sum.ln()).collect()
}

fn argmax(logits: &[f64]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

#[test]
fn penalties_and_biases_match_their_formulas() {
    for device in executors() {
        let model = builtin(&device, None);
        let first = argmax(&logits(&model, &PROMPT));
        let cases = [
            (0.0, 0.0, BTreeMap::from([(first, -1000.0)])),
            (0.0, 0.0, BTreeMap::from([(77, 1000.0)])),
            (4.0, 0.0, BTreeMap::new()),
            (0.0, 5.0, BTreeMap::new()),
            (-1.0, -0.5, BTreeMap::new()),
            (0.5, 0.6, BTreeMap::from([(first, 2.0), (50, 1.5)])),
        ];
        for (presence_penalty, frequency_penalty, logit_bias) in cases {
            let options =
                GenerateOptions { presence_penalty, frequency_penalty, logit_bias: logit_bias.clone(), ..endless(24) };
            let (got, ..) = collect(model.session().unwrap().generate_ids(&PROMPT, &options).unwrap());
            let mut want: Vec<u32> = Vec::new();
            for _ in 0..24 {
                let mut scores = logits(&model, &[&PROMPT[..], &want].concat());
                for (id, score) in scores.iter_mut().enumerate() {
                    let count = want.iter().filter(|&&token| token as usize == id).count();
                    if count > 0 {
                        *score -= f64::from(presence_penalty) + f64::from(frequency_penalty) * count as f64;
                    }
                    *score += f64::from(logit_bias.get(&(id as u32)).copied().unwrap_or(0.0));
                }
                want.push(argmax(&scores));
            }
            assert_eq!(got, want, "{presence_penalty}, {frequency_penalty}, {logit_bias:?}, {}", device.info().name);
        }
        let (plain, ..) = collect(model.session().unwrap().generate_ids(&PROMPT, &endless(24)).unwrap());
        let penalised = GenerateOptions { frequency_penalty: 5.0, ..endless(24) };
        let (got, ..) = collect(model.session().unwrap().generate_ids(&PROMPT, &penalised).unwrap());
        assert_ne!(got, plain, "the penalty changes this text, or it would test nothing");
    }
}

#[test]
fn options_out_of_range_are_refused() {
    let many = (0..1025).map(|id| (id, 1.0)).collect();
    let cases = [
        (GenerateOptions { temperature: 0.0005, ..endless(1) }, "temperature: 0.0005", "0, or 0.001 to 100"),
        (GenerateOptions { top_p: 0.0, ..endless(1) }, "top_p: 0", "above 0 to 1"),
        (GenerateOptions { min_p: 1.5, ..endless(1) }, "min_p: 1.5", "0 to 1"),
        (GenerateOptions { presence_penalty: 100.5, ..endless(1) }, "presence_penalty: 100.5", "-100 to 100"),
        (GenerateOptions { frequency_penalty: f32::NAN, ..endless(1) }, "frequency_penalty: NaN", "-100 to 100"),
        (
            GenerateOptions { logit_bias: BTreeMap::from([(3, f32::INFINITY)]), ..endless(1) },
            "logit_bias: inf",
            "-1000",
        ),
        (GenerateOptions { logit_bias: many, ..endless(1) }, "logit_bias: 1025", "at most 1024"),
        (GenerateOptions { logprobs: Some(101), ..endless(1) }, "logprobs: 101", "at most 100"),
        (GenerateOptions { logprobs: Some(1), prompt_lookup: 2, ..endless(1) }, "prompt_lookup: 2", "0: speculation"),
    ];
    for (options, found, expected) in cases {
        let error = options.check().unwrap_err();
        assert_eq!(error.code(), "option");
        let begin = format!("option {}, expected {expected}", found.replace(": ", " is "));
        assert!(error.to_string().starts_with(&begin), "{error}");
    }
    let model = builtin(&common::cpu(), None);
    for options in
        [BeamOptions { width: 0, ..BeamOptions::default() }, BeamOptions { width: 33, ..BeamOptions::default() }]
    {
        assert!(matches!(block_on(model.beam_search(&PROMPT, &options)), Err(Error::Option { option: "width", .. })));
    }
}

#[test]
fn logprobs_match_the_softmax_of_the_logits() {
    for device in executors() {
        let model = builtin(&device, None);
        let (plain, ..) = collect(model.session().unwrap().generate_ids(&PROMPT, &endless(16)).unwrap());
        let drawn =
            GenerateOptions { temperature: 1.3, seed: Some(5), ignore_eos: true, ..GenerateOptions::greedy(16) };
        for (options, n) in [(endless(16), 5), (endless(16), 0), (drawn, 3)] {
            let options = GenerateOptions { logprobs: Some(n), ..options };
            let mut session = model.session().unwrap();
            let mut generation = session.generate_ids(&PROMPT, &options).unwrap();
            let mut ids = PROMPT.to_vec();
            while let Some(piece) = block_on(generation.next()) {
                let piece = piece.unwrap();
                let told = piece.logprobs.expect("log-probabilities were requested");
                let want = log_softmax(&logits(&model, &ids));
                let close = |got: f32, id: u32| (f64::from(got) - want[id as usize]).abs() < 1e-3;
                assert!(close(told.logprob, piece.id), "{} and {}", told.logprob, want[piece.id as usize]);
                assert_eq!(told.top.len(), n as usize);
                assert!(told.top.iter().all(|&(id, logprob)| close(logprob, id)));
                assert!(told.top.is_sorted_by(|a, b| a.1 >= b.1));
                let n_above =
                    want.iter().filter(|&&other| told.top.iter().all(|top| other > f64::from(top.1) + 1e-3)).count();
                assert!(n == 0 || n_above == 0, "{n_above} tokens are likelier than those reported");
                ids.push(piece.id);
            }
            if options.temperature == 0.0 {
                assert_eq!(ids[PROMPT.len()..], plain);
            }
        }
    }
}

/// The same beam search with every sequence recomputed.
fn searched(
    model: &Model,
    width: usize,
    max_tokens: usize,
    length_penalty: f64,
    end_ids: &[u32],
) -> Vec<(Vec<u32>, f64)> {
    let score = |logprob: f64, n: usize| logprob / (n as f64).powf(length_penalty);
    let (mut live, mut ended) = (vec![(Vec::<u32>::new(), 0.0)], Vec::<(Vec<u32>, f64)>::new());
    for n in 1..=max_tokens {
        let mut all: Vec<(Vec<u32>, f64)> = Vec::new();
        for (ids, logprob) in &live {
            let logprobs = log_softmax(&logits(model, &[&PROMPT[..], ids].concat()));
            all.extend((0..).zip(logprobs).map(|(id, of_id)| ([&ids[..], &[id]].concat(), logprob + of_id)));
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        let ends = |ids: &[u32]| end_ids.contains(ids.last().unwrap());
        ended.extend(all.iter().take(width).filter(|(ids, _)| ends(ids)).map(|(ids, lp)| (ids.clone(), score(*lp, n))));
        ended.sort_by(|a, b| b.1.total_cmp(&a.1));
        live = all.into_iter().filter(|(ids, _)| !ends(ids)).take(width).collect();
        if ended.len() >= width && ended[width - 1].1 >= score(live[0].1, n) {
            live.clear();
            break;
        }
    }
    ended.extend(live.into_iter().map(|(ids, lp)| {
        let n = ids.len();
        (ids, score(lp, n))
    }));
    ended.sort_by(|a, b| b.1.total_cmp(&a.1));
    ended.truncate(width);
    ended
}

#[test]
fn beam_search_matches_an_uncached_reference() {
    for device in executors() {
        beams_are_searched_on(&device);
    }
}

fn beams_are_searched_on(device: &Device) {
    let model = builtin(device, None);
    let found = |options: &BeamOptions| -> Vec<Beam> { block_on(model.beam_search(&PROMPT, options)).unwrap() };
    // A single beam is the greedy completion.
    let (greedy, ..) = collect(model.session().unwrap().generate_ids(&PROMPT, &endless(20)).unwrap());
    let one = found(&BeamOptions { width: 1, max_tokens: 20, ignore_eos: true, ..BeamOptions::default() });
    assert_eq!(one[0].ids, greedy);
    // A frequent token, so that beams end.
    let common_id = greedy[2];
    for (width, max_tokens, length_penalty, ignore_eos) in
        [(2, 6, 1.0, false), (3, 8, 0.0, true), (4, 5, 2.0, false), (8, 4, 1.0, true)]
    {
        // Stop tokens end a text also where the model's own do not.
        let stop_ids = vec![common_id];
        let own = model.tokenizer().unwrap().eos_ids().iter().filter(|_| !ignore_eos);
        let end_ids: Vec<u32> = stop_ids.iter().chain(own).copied().collect();
        let options = BeamOptions { width, max_tokens, length_penalty, stop_ids, ignore_eos };
        let got = found(&options);
        let want = searched(&model, width, max_tokens, length_penalty.into(), &end_ids);
        assert_eq!(
            got.iter().map(|beam| &beam.ids).collect::<Vec<_>>(),
            want.iter().map(|(ids, _)| ids).collect::<Vec<_>>()
        );
        for (beam, (ids, score)) in got.iter().zip(&want) {
            assert!((beam.score - score).abs() < 1e-3, "{ids:?}: {} and {score}", beam.score);
            assert_eq!(beam.ended, end_ids.contains(beam.ids.last().unwrap()));
            let sum = beam.score * (beam.ids.len() as f64).powf(length_penalty.into());
            assert!((beam.logprob - sum).abs() < 1e-3, "{} and {sum}", beam.logprob);
        }
        assert_eq!(got.len(), width);
    }
}

#[test]
fn beam_search_ends_when_the_context_is_full() {
    let model = builtin(&common::cpu(), Some(8));
    let options = BeamOptions { width: 3, ignore_eos: true, ..BeamOptions::default() };
    let found = block_on(model.beam_search(&PROMPT, &options)).unwrap();
    assert_eq!(found.len(), 3);
    // Four positions are left; the last token needs none.
    assert!(found.iter().all(|beam| beam.ids.len() == 5 && !beam.ended), "{found:?}");
}
