// Ends a pass: the chosen token joins the sequence and the state moves on to it, so that the next pass needs no word
// from the host. A NON_FINITE choice is reported in the state and not stored as a token.
//
// Dispatch (1, 1, 1).
#import order
#import state

struct Params { capacity: u32, _pad0: u32, _pad1: u32, _pad2: u32 } // tokens that `tokens` holds
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;           // [1]
@group(0) @binding(2) var<storage, read_write> state: array<u32>;   // step state
@group(0) @binding(3) var<storage, read_write> tokens: array<u32>;  // [S]

@compute @workgroup_size(1)
fn advance() {
    let pos = state[POS] + state[N_TOKENS];
    state[POS] = pos;
    state[N_TOKENS] = 1u;
    state[TOKEN] = ids[0];
    if (pos < params.capacity) {
        tokens[pos] = select(ids[0], 0u, ids[0] == NON_FINITE);
    }
}
