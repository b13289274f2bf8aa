// Ends a pass: the chosen token joins the sequence and the state moves on to it, so that the next pass needs no word
// from the host. A NON_FINITE choice is reported in the state and not stored as a token.
//
// With a row of the step state for each sequence, each row that counts moves on to its own token, and `slot` says where the
// row's tokens are.
//
// Dispatch (1, 1, 1). At most WG rows.
#import order
#import state

struct Params { capacity: u32, n_rows: u32, row_words: u32, _pad: u32 } // capacity: tokens that `tokens` holds of a sequence
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;           // [rows]
@group(0) @binding(2) var<storage, read_write> state: array<u32>;   // step state
@group(0) @binding(3) var<storage, read_write> tokens: array<u32>;  // [slots, S]

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn advance(@builtin(local_invocation_index) row: u32) {
    let has_row = params.row_words > 0u;
    let own = row * params.row_words;
    // Of the first row: how many rows count.
    let n_rows = min(select(1u, state[N_TOKENS], has_row), params.n_rows);
    if (row < n_rows) {
        let pos = state[own + POS] + select(state[N_TOKENS], 1u, has_row);
        let id = ids[row];
        state[own + POS] = pos;
        state[own + TOKEN] = id;
        var own_tokens = 0u;
        if (has_row) {
            own_tokens = state[own + SLOT] * params.capacity;
        } else {
            state[N_TOKENS] = 1u;
        }
        if (pos < params.capacity) {
            tokens[own_tokens + pos] = select(id, 0u, id == NON_FINITE);
        }
    }
}
