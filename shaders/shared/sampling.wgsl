// Words of the sampling settings; see `Sampling` in src/kernels/sample.rs.
const TEMPERATURE: u32 = 0u;
const TOP_K: u32 = 1u; // 0: off
const TOP_P: u32 = 2u; // 1: off
const MIN_P: u32 = 3u; // 0: off
const SEED_LOW: u32 = 4u;
const SEED_HIGH: u32 = 5u;
const REPEAT_PENALTY: u32 = 6u; // 1: off
const REPEAT_LAST_N: u32 = 7u;
const PRESENCE_PENALTY: u32 = 8u; // 0: off
const FREQUENCY_PENALTY: u32 = 9u; // 0: off
const GENERATED_FROM: u32 = 10u;
const N_BIASES: u32 = 11u;
const SETTINGS: u32 = 12u; // words of a row

const MOST: u32 = 1024u; // top-k of which `candidates` makes lists

fn has_lists(k: u32, n_vocab: u32) -> bool {
    return k > 0u && k <= MOST && k < n_vocab;
}
