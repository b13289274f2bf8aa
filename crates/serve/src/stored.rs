//! Responses in memory, which later requests continue by `previous_response_id`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value as Json;

/// The conversation up to a response: all of its input and output items.
pub type Items = Vec<Arc<Json>>;

/// The latest responses, by API key and id. The least recently used ones go first.
pub struct StoredResponses {
    most_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: HashMap<Name, Entry>,
    /// By the turn of their last use.
    order: BTreeMap<u64, Name>,
    n_turns: u64,
    n_bytes: usize,
}

/// An API key's identifier and a response's id.
type Name = (Option<String>, String);

struct Entry {
    items: Items,
    n_bytes: usize,
    turn: u64,
}

impl State {
    /// Makes an entry the most recently used one, and returns its turn.
    fn use_now(&mut self, name: Name) -> u64 {
        self.n_turns += 1;
        self.order.insert(self.n_turns, name);
        self.n_turns
    }
}

impl StoredResponses {
    /// Keeps responses of up to `most_bytes` together.
    pub fn new(most_bytes: usize) -> StoredResponses {
        StoredResponses { most_bytes, state: Mutex::default() }
    }

    /// Keeps a conversation. One that is larger than all memory for them is not kept.
    pub fn put(&self, key: Option<String>, id: String, items: Items) {
        let n_bytes = id.len() + items.iter().map(|item| size_of(item)).sum::<usize>();
        if n_bytes > self.most_bytes {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.n_bytes + n_bytes > self.most_bytes
            && let Some((_, oldest)) = state.order.pop_first()
        {
            let freed = state.entries.remove(&oldest).map_or(0, |entry| entry.n_bytes);
            state.n_bytes -= freed;
        }
        let name = (key, id);
        state.n_bytes += n_bytes;
        let turn = state.use_now(name.clone());
        state.entries.insert(name, Entry { items, n_bytes, turn });
    }

    /// The conversation up to a response of this key.
    pub fn get(&self, key: &Option<String>, id: &str) -> Option<Items> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let name = (key.clone(), id.to_owned());
        let before = state.entries.get(&name)?.turn;
        state.order.remove(&before);
        let turn = state.use_now(name.clone());
        let entry = state.entries.get_mut(&name)?;
        entry.turn = turn;
        Some(entry.items.clone())
    }
}

/// Approximate memory of a value.
fn size_of(value: &Json) -> usize {
    const EACH: usize = 64;
    let inside = match value {
        Json::String(text) => text.len(),
        Json::Array(list) => list.iter().map(size_of).sum(),
        Json::Object(object) => object.iter().map(|(name, value)| name.len() + EACH + size_of(value)).sum(),
        _ => 0,
    };
    EACH + inside
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_responses_are_dropped_by_size() {
        let key = Some("key".to_owned());
        let item = |letter: &str| vec![Arc::new(Json::from(letter.repeat(1000)))];
        let stored = StoredResponses::new(3500);
        for id in ["a", "b", "c"] {
            stored.put(key.clone(), id.into(), item(id));
        }
        assert_eq!(stored.get(&key, "a"), Some(item("a")));
        stored.put(key.clone(), "d".into(), item("d"));
        assert!(stored.get(&key, "b").is_none(), "the least recently used");
        assert!(["a", "c", "d"].iter().all(|id| stored.get(&key, id).is_some()));
        assert!(stored.get(&None, "a").is_none(), "of another key");
        stored.put(key.clone(), "e".into(), vec![Arc::new(Json::from("e".repeat(4000)))]);
        assert!(stored.get(&key, "e").is_none() && stored.get(&key, "d").is_some(), "too large");
    }
}
