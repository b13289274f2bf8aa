// Penalties and biases of single tokens, in place. A token's logit is changed in this order:
//
//   repetition penalty (Keskar et al. 2019, arXiv:1909.05858), if it is among the last `repeat_last_n` tokens: a
//   positive logit is divided by it, a negative one multiplied, once per distinct token
//   presence and frequency penalty, if it is among the tokens from `generated_from` on: subtracted, the latter once
//   for each occurrence
//   bias, if it is in the list of biases: added
//
// A workgroup has CHUNK ids to itself and a word for each in workgroup memory: how often the token was generated, and whether
// it is recent. It walks all these tokens once, so the work is linear in their number; comparing them with each other
// would be quadratic.
//
// Rows of logits have settings, biases and a row of the step state of their own, and `slot` says where a row's tokens are.
//
// Dispatch (ceil(V / CHUNK), rows, 1).
#import sampling
#import state

struct Params { n_vocab: u32, capacity: u32, row_words: u32, biases_stride: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;     // [rows], sampling settings
@group(0) @binding(2) var<storage, read> state: array<u32>;        // step state
@group(0) @binding(3) var<storage, read> tokens: array<u32>;       // [slots, S]
@group(0) @binding(4) var<storage, read> biases: array<u32>;       // [rows, 2 B], id and bias in turns; those that count come first
@group(0) @binding(5) var<storage, read_write> logits: array<f32>; // [rows, V]

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;
const RECENT: u32 = 0x80000000u;

var<workgroup> seen: array<atomic<u32>, CHUNK>;

@compute @workgroup_size(WG)
fn penalize(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let settings = group.y * SETTINGS;
    let own = group.y * params.row_words;
    let has_row = params.row_words > 0u;
    let own_logits = group.y * params.n_vocab;
    let own_biases = group.y * params.biases_stride;
    var own_tokens = 0u;
    var n_tokens = state[own + N_TOKENS];
    if (has_row) {
        own_tokens = state[own + SLOT] * params.capacity;
        n_tokens = 1u;
    }
    let end = min(state[own + POS] + n_tokens, params.capacity);
    let recent_from = end - min(sampling[settings + REPEAT_LAST_N], end);
    let generated_from = min(sampling[settings + GENERATED_FROM], end);
    let first = group.x * CHUNK;
    let n_ids = min(params.n_vocab - first, CHUNK);
    for (var i = local; i < CHUNK; i += WG) {
        atomicStore(&seen[i], 0u);
    }
    workgroupBarrier();
    for (var i = min(recent_from, generated_from) + local; i < end; i += WG) {
        // Ids of other workgroups are past the end: those below `first` wrap around.
        let id = tokens[own_tokens + i] - first;
        if (id < n_ids) {
            if (i >= generated_from) {
                atomicAdd(&seen[id], 1u);
            }
            if (i >= recent_from) {
                atomicOr(&seen[id], RECENT);
            }
        }
    }
    workgroupBarrier();
    let penalty = bitcast<f32>(sampling[settings + REPEAT_PENALTY]);
    for (var id = local; id < n_ids; id += WG) {
        let word = atomicLoad(&seen[id]);
        if (word != 0u) {
            var logit = logits[own_logits + first + id];
            if (word >= RECENT) {
                logit = select(logit * penalty, logit / penalty, logit > 0.0);
            }
            let count = word % RECENT;
            if (count > 0u) {
                logit -= bitcast<f32>(sampling[settings + PRESENCE_PENALTY]);
                logit -= bitcast<f32>(sampling[settings + FREQUENCY_PENALTY]) * f32(count);
            }
            logits[own_logits + first + id] = logit;
        }
    }
    // Each id is the same invocation's as above.
    let n_biases = min(sampling[settings + N_BIASES], params.biases_stride / 2u);
    for (var i = 0u; i < n_biases; i += 1u) {
        let id = biases[own_biases + 2u * i] - first;
        if (id < n_ids && id % WG == local) {
            logits[own_logits + first + id] += bitcast<f32>(biases[own_biases + 2u * i + 1u]);
        }
    }
}
