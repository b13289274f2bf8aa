//! `config.json` as keys and values.

use super::{common, data};
use tilewright::Error;
use tilewright::formats::ConfigJson;

#[test]
fn values_come_back_as_written() {
    let config = ConfigJson::parse(
        br#"{"model_type": "gemma3_text", "hidden_size": 64, "rms_norm_eps": 1e-06, "tie_word_embeddings": true,
             "sliding_window": null, "rope_theta": 10000, "architectures": ["Gemma3ForCausalLM"],
             "eos_token_id": [1, 106], "rope_scaling": {"factor": 8.0, "short_factor": [1.0, 2], "deep": {"x": -1}}}"#,
    )
    .unwrap();
    assert_eq!(config.get_str("model_type").unwrap(), Some("gemma3_text"));
    assert_eq!(config.get_u32("hidden_size").unwrap(), Some(64));
    assert_eq!(config.get_f32("rms_norm_eps").unwrap(), Some(1e-6));
    assert_eq!(config.get_f32("rope_theta").unwrap(), Some(10_000.0));
    assert_eq!(config.get_bool("tie_word_embeddings").unwrap(), Some(true));
    assert_eq!(config.get_u32("sliding_window").unwrap(), None);
    assert_eq!(config.get_u32("absent").unwrap(), None);
    assert_eq!(config.get_str_array("architectures").unwrap(), Some(vec!["Gemma3ForCausalLM"]));
    assert_eq!(config.get_u32_array("eos_token_id").unwrap(), Some(vec![1, 106]));
    assert_eq!(config.get_f32("rope_scaling.factor").unwrap(), Some(8.0));
    assert_eq!(config.get_f32_array("rope_scaling.short_factor").unwrap(), Some(vec![1.0, 2.0]));
    assert_eq!(config.get_f32("rope_scaling.deep.x").unwrap(), Some(-1.0));
    assert_eq!(config.get_f32("absent.factor").unwrap(), None);
    assert_eq!(config.get_f32("sliding_window.factor").unwrap(), None);

    for (key, error) in [
        ("rms_norm_eps", config.get_u32("rms_norm_eps").err()),
        ("rope_scaling.deep.x", config.get_u32("rope_scaling.deep.x").err()),
        ("model_type", config.get_bool("model_type").err()),
        ("hidden_size", config.get_str("hidden_size").err()),
        ("eos_token_id", config.get_str_array("eos_token_id").err()),
        ("hidden_size.x", config.get_u32("hidden_size.x").err()),
    ] {
        match error {
            Some(Error::Config { field, .. }) => assert_eq!(field, key),
            other => panic!("{key}: {other:?}"),
        }
    }
}

#[test]
fn malformed_config_json_is_an_error_with_its_offset() {
    let deep = format!("{{\"a\":{}", "[".repeat(10_000));
    let large = format!("{{\"a\":\"{}\"}}", "x".repeat(5 << 20));
    for (json, at) in [("", 0), ("[]", 0), ("{\n\n\"a\": 1,}", 10), ("{\"a\":\"", 6), (&deep, 131), (&large, 4 << 20)] {
        match ConfigJson::parse(json.as_bytes()) {
            Err(Error::Format { format: "config.json", offset, .. }) => {
                assert!(offset.abs_diff(at) <= 2, "{offset}: {at}")
            }
            other => panic!("{:?}: {other:?}", &json[..json.len().min(20)]),
        }
    }
    assert!(ConfigJson::parse(b"{\"a\": \xFF}").is_err());
    assert!(matches!(ConfigJson::parse(b"{\"a\": 1e39}").unwrap().get_f32("a"), Err(Error::Config { .. })));
}

#[test]
fn all_published_configs_parse() {
    let files = common::data_roots().into_iter().flat_map(|root| data::files(&root, "json"));
    let configs = files.filter(|path| path.file_name().is_some_and(|name| name == "config.json"));
    let mut n_files = 0;
    for path in configs {
        let config = ConfigJson::parse(&data::read(&path)).unwrap_or_else(|error| panic!("{}", error.in_file(&path)));
        // Modules of sentence-transformers, such as `1_Pooling`, have a different `config.json`. Vision models nest
        // the keys of their language model.
        let is_module = |part: &str| part.split_once('_').is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if !path.components().any(|part| part.as_os_str().to_str().is_some_and(is_module)) {
            assert!(config.get_str("model_type").unwrap().is_some(), "{}", path.display());
            let has_parts = serde_json::from_slice::<serde_json::Value>(&data::read(&path))
                .is_ok_and(|all| all.as_object().is_some_and(|all| all.keys().any(|key| key.ends_with("_config"))));
            assert!(has_parts || config.get_u32("vocab_size").unwrap().is_some(), "{}", path.display());
            n_files += 1;
        }
    }
    assert!(n_files >= 20, "{n_files}");
}
