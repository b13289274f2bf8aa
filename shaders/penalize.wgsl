// Repetition penalty, in place: the logit of each token among the last `repeat_last_n` is divided by the penalty where
// positive and multiplied where negative, once per distinct token. Keskar et al. 2019, arXiv:1909.05858.
//
// A workgroup has CHUNK ids to itself and one bit for each in workgroup memory. It walks all recent tokens; whoever sets
// a bit first changes that logit. The work grows with the number of tokens, where comparing them with each other would
// grow with its square. Which of several equal tokens comes first does not matter: they would all do the same.
//
// Dispatch (ceil(V / CHUNK), 1, 1).
#import sampling
#import state

struct Params { n_vocab: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sampling: array<u32>;     // sampling settings
@group(0) @binding(2) var<storage, read> state: array<u32>;        // step state
@group(0) @binding(3) var<storage, read> tokens: array<u32>;       // [S]
@group(0) @binding(4) var<storage, read_write> logits: array<f32>; // [V]

const WG: u32 = 256u;
const CHUNK: u32 = 32768u;
const WORDS: u32 = CHUNK / 32u;

var<workgroup> seen: array<atomic<u32>, WORDS>;

@compute @workgroup_size(WG)
fn penalize(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let end = min(state[POS] + state[N_TOKENS], arrayLength(&tokens));
    let n = min(sampling[REPEAT_LAST_N], end);
    let penalty = bitcast<f32>(sampling[REPEAT_PENALTY]);
    let first = group.x * CHUNK;
    let n_ids = min(params.n_vocab - first, CHUNK);
    for (var i = local; i < WORDS; i += WG) {
        atomicStore(&seen[i], 0u);
    }
    workgroupBarrier();
    for (var i = end - n + local; i < end; i += WG) {
        // Ids of other workgroups are past the end: those below `first` wrap around.
        let id = tokens[i] - first;
        if (id < n_ids) {
            let bit = 1u << (id % 32u);
            if ((atomicOr(&seen[id / 32u], bit) & bit) == 0u) {
                let logit = logits[first + id];
                logits[first + id] = select(logit * penalty, logit / penalty, logit > 0.0);
            }
        }
    }
}
