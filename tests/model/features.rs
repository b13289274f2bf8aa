//! Features that distinguish architectures, each disabled in its own model: logits must then leave the references. A
//! comparison that passes without a feature does not test it.

use tilewright::kernels::{Decay, DeltaRule, ExpertScore, Gate, Gelu, QkNorm, RopeScaling, RopeStyle};
use tilewright::load::{ModelFile, ModelShape};
use tilewright::model::{Attention, Between, Experts, FeedForward, ModelConfig, Recurrence};
use tilewright::{LoadOptions, Model};

use super::TINY_TOLERANCE;
use super::common::{self, References, block_on, largest_difference};

/// A feature's name, and a function to disable it.
type Feature = (&'static str, fn(&mut ModelConfig));

fn attentions(config: &mut ModelConfig, change: impl Fn(&mut Attention)) {
    config.blocks.iter_mut().for_each(|block| change(&mut block.attention));
}

fn feed_forwards(config: &mut ModelConfig, change: impl Fn(&mut FeedForward)) {
    config.blocks.iter_mut().for_each(|block| change(&mut block.feed_forward));
}

fn experts(config: &mut ModelConfig, change: impl Fn(&mut Experts)) {
    feed_forwards(config, |ffn| ffn.experts.iter_mut().for_each(&change));
}

fn delta_rules(config: &mut ModelConfig, change: impl Fn(&mut DeltaRule)) {
    for block in &mut config.blocks {
        if let Some(Recurrence::DeltaNet { rule, .. }) = &mut block.recurrence {
            change(rule);
        }
    }
}

fn no_shares(config: &mut ModelConfig) {
    feed_forwards(config, |ffn| {
        ffn.experts.iter_mut().for_each(|experts| experts.router.shares = !experts.router.shares);
    });
}

const WINDOW: Feature = ("the window", |config| attentions(config, |attention| attention.window = None));
const ONE_MORE: Feature =
    ("the window's size", |config| attentions(config, |a| a.window = a.window.map(|window| window + 1)));
const SCALE: Feature =
    ("the scale of scores", |config| attentions(config, |a| a.scale = 0.7 * (a.head_dim as f32).powf(-0.5)));
const STRETCH: Feature =
    ("the stretched angles", |config| config.ropes.iter_mut().for_each(|rope| rope.scaling = RopeScaling::None));
const SOFT_CAP: Feature = ("the logits' cap", |config| config.logit_soft_cap = None);
const EMBEDDING: Feature = ("the embedding's factor", |config| config.embd_scale = 1.0);
const SHARES: Feature = ("the router's shares", no_shares);
const BEFORE: Feature = ("a norm of heads before they turn", |config| {
    attentions(config, |attention| {
        attention.qk_norm = match attention.qk_norm {
            Some(QkNorm::RotatedHeads) => Some(QkNorm::Heads),
            _ => Some(QkNorm::RotatedHeads),
        };
    });
});
const PAIRS: Feature = ("the pairs", |config| {
    config.ropes.iter_mut().for_each(|rope| {
        rope.style = match rope.style {
            RopeStyle::Halves => RopeStyle::Interleaved,
            RopeStyle::Interleaved => RopeStyle::Halves,
        };
    });
});
const POSITIONS: Feature = ("the lack of positions", |config| attentions(config, |attention| attention.rope = Some(0)));

const OF_VALUES: Feature =
    ("the norm of values", |config| attentions(config, |attention| attention.qk_norm = Some(QkNorm::Heads)));
const LOGITS: Feature = ("the logits' factor", |config| config.logit_scale = 1.0);
const SHARED_KEYS: Feature =
    ("which heads share a key", |config| delta_rules(config, |rule| rule.grouped = !rule.grouped));
const SCORES: Feature =
    ("sigmoid scores", |config| experts(config, |experts| experts.router.score = ExpertScore::Softmax));
const EXPERTS_SCALE: Feature = ("the experts' factor", |config| experts(config, |experts| experts.router.scale = 1.0));
const GROUPS: Feature = ("groups of experts", |config| experts(config, |experts| experts.router.groups = None));
const TURNED: Feature = ("partial rotation", |config| {
    let head_dim = config.blocks[0].attention.head_dim;
    config.ropes.iter_mut().for_each(|rope| rope.rot_dims = head_dim);
});
const FORM: Feature = ("the squared ReLU", |config| {
    feed_forwards(config, |ffn| ffn.between = Between::Gelu(Gelu::Exact));
});

const FAMILIES: &[(&str, &[Feature])] = &[
    ("ernie4-5", &[PAIRS]),
    ("exaone4", &[WINDOW, ONE_MORE, POSITIONS]),
    ("gemma2", &[WINDOW, ONE_MORE, SCALE, SOFT_CAP, EMBEDDING]),
    ("gemma3", &[WINDOW, ONE_MORE, SCALE, STRETCH, EMBEDDING]),
    (
        "gemma4",
        &[
            WINDOW,
            ONE_MORE,
            SCALE,
            STRETCH,
            SOFT_CAP,
            EMBEDDING,
            BEFORE,
            OF_VALUES,
            ("whose keys are read", |config| config.blocks[4].attention.keys_of = Some(1)),
            ("the form of GELU", |config| {
                feed_forwards(config, |ffn| ffn.between = Between::Gate(Gate::Gelu(Gelu::Exact)));
            }),
        ],
    ),
    (
        "gpt-oss",
        &[
            WINDOW,
            ONE_MORE,
            STRETCH,
            ("the gate", |config| feed_forwards(config, |ffn| ffn.between = Between::Gate(Gate::Silu))),
            ("the ends of YaRN's range", |config| {
                if let RopeScaling::Yarn { truncate, .. } = &mut config.ropes[0].scaling {
                    *truncate = true;
                }
            }),
        ],
    ),
    (
        "granite-hybrid",
        &[
            SCALE,
            EMBEDDING,
            POSITIONS,
            SHARES,
            ("the factor of what halves add", |config| config.residual_scale = 1.0),
            LOGITS,
        ],
    ),
    ("granite-moe", &[SCALE, EMBEDDING, SHARES, PAIRS]),
    ("hunyuan-dense", &[BEFORE]),
    ("lfm2", &[BEFORE]),
    (
        "ministral3",
        &[
            STRETCH,
            ("the growth of queries", |config| {
                config.ropes.iter_mut().for_each(|rope| rope.query_growth = None);
            }),
        ],
    ),
    (
        "olmo3",
        &[
            WINDOW,
            ONE_MORE,
            STRETCH,
            ("the windows' own angles", |config| {
                attentions(config, |attention| attention.rope = Some(0));
            }),
        ],
    ),
    ("olmoe", &[SHARES]),
    ("deepseek-v2", &[SCALE, STRETCH, SHARES, PAIRS]),
    ("falcon-h1", &[SCALE, EMBEDDING, LOGITS]),
    ("gemma4-31b", &[WINDOW, ONE_MORE, SCALE, STRETCH, SOFT_CAP, OF_VALUES]),
    ("gemma4-moe", &[WINDOW, SHARES, OF_VALUES]),
    ("glm4-moe", &[SHARES, SCORES, EXPERTS_SCALE, BEFORE, TURNED]),
    ("glm4-moe-lite", &[SHARES, SCORES, EXPERTS_SCALE, PAIRS]),
    ("lfm3", &[WINDOW, ONE_MORE, STRETCH, BEFORE]),
    ("ling2", &[SHARES, SCORES, EXPERTS_SCALE, BEFORE, TURNED, PAIRS, GROUPS]),
    (
        "ling3",
        &[
            SHARES,
            SCORES,
            EXPERTS_SCALE,
            PAIRS,
            GROUPS,
            ("the decays' bound", |config| {
                delta_rules(config, |rule| rule.decay = Decay::Channels { bound: -4.0 });
            }),
        ],
    ),
    ("mamba2", &[("the norms' epsilon", |config| config.norm_eps = 0.1)]),
    ("nemotron-h", &[POSITIONS, FORM]),
    ("nemotron-h-moe", &[POSITIONS, SHARES, SCORES, EXPERTS_SCALE]),
    (
        "olmo-hybrid",
        &[
            SHARED_KEYS,
            ("negative eigenvalues", |config| {
                delta_rules(config, |rule| rule.beta_scale = 1.0);
            }),
        ],
    ),
    ("qwen3-next", &[BEFORE, SHARED_KEYS, SHARES]),
    ("qwen35", &[BEFORE, SHARED_KEYS]),
];

#[test]
fn turning_off_any_model_feature_changes_the_logits() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let device = common::cpu();
    for (name, features) in FAMILIES {
        let folder = data.join("tiny-random").join(name);
        let references = References::open(&folder.join("refs.safetensors"));
        let worst = |change: fn(&mut ModelConfig)| {
            let mut file = ModelFile::open(&folder).unwrap();
            if let ModelShape::Decoder(config) = &mut file.header.shape {
                change(config);
            }
            let model = Model::from_file(&device, file, LoadOptions::default()).unwrap();
            let of = |i: usize| {
                let trace = block_on(model.trace(&references.ids(&format!("{i}.ids")))).unwrap();
                largest_difference(&trace.logits, &references.floats(&format!("{i}.logits")))
            };
            (0..4).map(of).fold(0.0, f32::max)
        };
        for (feature, turn_off) in *features {
            let difference = worst(*turn_off);
            println!("{name} without {feature}: logits off by {difference:.1e}");
            assert!(difference > 2.0 * TINY_TOLERANCE, "{name} without {feature}: {difference}");
        }
    }
}
