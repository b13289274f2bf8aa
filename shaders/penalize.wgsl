// Repetition penalty, in place: the logit of each token among the last `repeat_last_n` is divided by the penalty where
// positive and multiplied where negative, once per distinct token. Keskar et al. 2019, arXiv:1909.05858.
//
// Dispatch (1, 1, 1).
#import sampling
#import state

struct Params { n_vocab: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;     // sampling settings
@group(0) @binding(2) var<storage, read> state: array<u32>;        // step state
@group(0) @binding(3) var<storage, read> tokens: array<u32>;       // [S]
@group(0) @binding(4) var<storage, read_write> logits: array<f32>; // [V]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn penalize(@builtin(local_invocation_index) local: u32) {
    let end = min(state[POS] + state[N_TOKENS], arrayLength(&tokens));
    let n = min(sampling[REPEAT_LAST_N], end);
    let penalty = bitcast<f32>(sampling[REPEAT_PENALTY]);
    for (var i = local; i < n; i += WG) {
        let id = tokens[end - 1u - i];
        var is_first = id < params.n_vocab;
        for (var j = 0u; j < i; j++) {
            is_first = is_first && tokens[end - 1u - j] != id;
        }
        if (is_first) {
            let logit = logits[id];
            logits[id] = select(logit * penalty, logit / penalty, logit > 0.0);
        }
    }
}
