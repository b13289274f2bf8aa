// Layers with a state: the tokens of a pass follow each other in one sequence, or the step state has a row for each and says which
// of them in turn are of one sequence. The kernel's params have `n_tokens`, `row_words` and `has_slots`.
#import state

struct Run {
    state: u32, // where the row of the step state begins that tells of the sequence
    first: u32, // its first token in the pass
    end: u32,   // the end of its tokens, and of padding
    n: u32,     // tokens without padding
    slot: u32,  // its place among the states of all sequences
}

// The tokens that go through states one after the other, from the `i`-th row of the step state on. None where that is of the same
// sequence as the row before it.
fn run_of(i: u32) -> Run {
    let at = i * params.row_words;
    var run = Run(at, 0u, params.n_tokens, min(state[at + N_TOKENS], params.n_tokens), 0u);
    if (params.row_words > 0u) {
        run.first = i;
        run.end = i + 1u;
        run.n = min(run.n, 1u);
        if (state[at + N_BEFORE] > 0u) {
            run.end = i;
        }
        while (run.end > i && run.end < params.n_tokens && state[run.end * params.row_words + N_BEFORE] == run.end - i) {
            run.end++;
            run.n++;
        }
    }
    if (params.has_slots != 0u) {
        run.slot = state[at + SLOT];
    }
    return run;
}

// Rows of the step state.
fn n_runs() -> u32 {
    return select(1u, params.n_tokens, params.row_words > 0u);
}
