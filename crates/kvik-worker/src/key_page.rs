//! Some of many keys, in their order.

use std::collections::BTreeMap;

use kvik_proto::kv_stream::KvKey;

/// The first keys behind one, of those that are offered in no order. It keeps no more than it gives.
#[derive(Debug)]
pub(crate) struct KeyPage<T> {
    after: Option<KvKey>,
    limit: usize,
    /// One more than the limit, to know whether there are more.
    kept: BTreeMap<KvKey, T>,
}

impl<T> KeyPage<T> {
    pub(crate) fn new(after: Option<KvKey>, limit: usize) -> Self {
        Self { after, limit, kept: BTreeMap::new() }
    }

    /// Keeps a key with what `value` gives, if it belongs to the page by what was offered so far.
    pub(crate) fn offer(&mut self, key: KvKey, value: impl FnOnce() -> T) {
        let is_full = self.kept.len() > self.limit;
        let is_behind_last = || self.kept.last_key_value().is_some_and(|(last, _)| *last < key);
        if self.after.is_some_and(|after| key <= after) || is_full && is_behind_last() {
            return;
        }
        self.kept.insert(key, value());
        if self.kept.len() > self.limit + 1 {
            self.kept.pop_last();
        }
    }

    /// The keys in their order, and whether there are more behind them.
    pub(crate) fn finish(mut self) -> (Vec<(KvKey, T)>, bool) {
        let has_more = self.kept.len() > self.limit;
        if has_more {
            self.kept.pop_last();
        }
        (self.kept.into_iter().collect(), has_more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_first_keys_behind_one_in_their_order() {
        let keys = [5, 1, 9, 3, 7, 2, 8];
        let page = |after: Option<u64>, limit| {
            let mut page = KeyPage::new(after.map(KvKey), limit);
            for key in keys {
                page.offer(KvKey(key), || ());
            }
            let (found, has_more) = page.finish();
            (found.into_iter().map(|(key, ())| key.0).collect::<Vec<u64>>(), has_more)
        };
        assert_eq!(page(None, 3), (vec![1, 2, 3], true));
        assert_eq!(page(Some(3), 3), (vec![5, 7, 8], true));
        assert_eq!(page(Some(8), 3), (vec![9], false));
        assert_eq!(page(Some(0), 7), (vec![1, 2, 3, 5, 7, 8, 9], false));
        assert_eq!(page(Some(9), 7), (vec![], false));
    }
}
