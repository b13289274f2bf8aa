//! SentencePiece's normalisation rules.

use super::vocab::fault;
use crate::error::Error;

/// Replacements of text prefixes: SentencePiece's `precompiled_charsmap`, which holds the size in bytes of a
/// double-array trie (Aoe 1989) in Darts-clone's layout, the trie, and zero-terminated replacements.
#[derive(Debug)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    texts: String,
}

/// Limit of a replacement in bytes; Unicode's own have up to 33.
const MAX_TEXT: usize = 256;
/// Flag of a unit that holds a value.
const VALUE: u32 = 1 << 31;

impl Charsmap {
    /// `field` names the rules in errors.
    pub fn new(field: &str, bytes: &[u8]) -> Result<Charsmap, Error> {
        let Some((size, rest)) = bytes.split_first_chunk() else {
            return match bytes {
                [] => Ok(Charsmap { units: Vec::new(), texts: String::new() }),
                _ => Err(fault(field, "at least 4 bytes", bytes.len())),
            };
        };
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, texts) = rest
            .split_at_checked(size)
            .filter(|_| size.is_multiple_of(4))
            .ok_or_else(|| fault(field, format!("a multiple of 4 up to {}, the size of a trie", rest.len()), size))?;
        let texts = String::from_utf8(texts.to_vec()).map_err(|error| fault(field, "texts in UTF-8", error))?;
        let units: Vec<u32> = trie.as_chunks().0.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
        let values = units.iter().filter(|unit| *unit & VALUE != 0).map(|unit| unit & !VALUE);
        for at in values {
            let ends = |text: &[u8]| text.iter().take(MAX_TEXT + 1).any(|&byte| byte == 0);
            if !texts.is_char_boundary(at as usize) || !ends(&texts.as_bytes()[at as usize..]) {
                return Err(fault(field, format!("offsets of zero-terminated texts of up to {MAX_TEXT} bytes"), at));
            }
        }
        Ok(Charsmap { units, texts })
    }

    /// The prefixes of `text` with a rule, shortest first: length in bytes, and replacement.
    pub fn starts(&self, text: &[u8]) -> impl Iterator<Item = (usize, &str)> {
        let behind = |unit: u32| ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize;
        let root = self.units.first().map_or(usize::MAX, |&unit| behind(unit));
        let found = text.iter().enumerate().scan(root, move |node, (i, &byte)| {
            *node ^= usize::from(byte);
            let &unit = self.units.get(*node).filter(|unit| *unit & (VALUE | 0xff) == u32::from(byte))?;
            *node ^= behind(unit);
            let value = if unit & 1 << 8 != 0 { self.units.get(*node) } else { None };
            Some(value.map(|value| (i + 1, (value & !VALUE) as usize)))
        });
        found.flatten().filter_map(|(len, at)| self.texts.get(at..)?.split('\0').next().map(|text| (len, text)))
    }
}
