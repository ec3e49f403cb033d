//! A trie of characters, the least recently used leaves leave first.

use std::collections::{BTreeSet, HashMap};
use std::mem;

use kvik_types::TokenId;
use parking_lot::Mutex;

use super::{KnownPrefix, PrefixStore, TokenCut};
use crate::tokenizer::TokenizerKey;

/// Distance of cuts: short, because a text may leave the known ones at any character, and long enough that
/// tokenizing part by part costs little.
const CUT_DISTANCE_BYTES: usize = 64;

/// Memory of a node beside the text, marks and tokens it points at: itself, its place among the leaves and
/// in its parent.
const NODE_BYTES: usize =
    mem::size_of::<Option<Node>>() + mem::size_of::<(u64, usize)>() * 2 + mem::size_of::<(char, usize)>();

/// Prefixes as paths in a trie.
///
/// Characters that follow each other without a branch share a node.
#[derive(Debug)]
pub struct TriePrefixStore {
    max_bytes: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    nodes: Vec<Option<Node>>,
    free: Vec<usize>,
    roots: HashMap<TokenizerKey, usize>,
    /// Nodes without children, roots aside, by the time of their last use.
    leaves: BTreeSet<(u64, usize)>,
    last_use: u64,
    used_bytes: usize,
}

#[derive(Debug)]
struct Node {
    /// What comes after the text of the parent; empty in a root.
    text: Box<str>,
    /// In rising order.
    marks: Vec<Mark>,
    parent: Place,
    /// By the first character of their texts, in rising order.
    children: Vec<(char, usize)>,
    used: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Root(TokenizerKey),
    Below(usize),
}

/// A cut, at the place where it is seen.
#[derive(Debug)]
struct Mark {
    /// Bytes of the node's text that show that it is a cut.
    seen_bytes: usize,
    /// The cut, counted from the beginning of the text.
    n_bytes: usize,
    /// Tokens since the mark before, on the way from the root.
    tokens: Box<[TokenId]>,
}

/// Where the way of a text through the trie ends.
#[derive(Debug)]
struct Way {
    node: usize,
    /// Bytes of the node's text that are on the way.
    n_node_bytes: usize,
    /// Bytes of the text that are on the way.
    n_text_bytes: usize,
    known: KnownPrefix,
}

// === impl TriePrefixStore ===

impl TriePrefixStore {
    /// An empty store that takes at most about `max_bytes` of memory.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, inner: Mutex::new(Inner::default()) }
    }
}

impl PrefixStore for TriePrefixStore {
    fn find(&self, tokenizer: TokenizerKey, text: &str) -> KnownPrefix {
        let mut inner = self.inner.lock();
        let Some(root) = inner.roots.get(&tokenizer).copied() else { return KnownPrefix::default() };
        inner.walk(root, text).known
    }

    fn add(&self, tokenizer: TokenizerKey, text: &str, tokens: &[TokenId], cuts: &[TokenCut]) {
        // Nothing is known of what comes after the last cut.
        let Some(text) = cuts.last().and_then(|last| text.get(..last.seen_bytes)) else { return };
        let mut inner = self.inner.lock();
        let root = inner.root(tokenizer);
        let way = inner.walk(root, text);
        if way.n_text_bytes < text.len() {
            let (mut n_bytes, mut n_tokens) = (way.known.n_bytes, way.known.tokens.len());
            let mut marks = Vec::new();
            for cut in cuts.iter().filter(|cut| way.n_text_bytes < cut.seen_bytes) {
                let Some(new_tokens) = tokens.get(n_tokens..cut.n_tokens) else { return };
                if n_bytes < cut.n_bytes {
                    let seen_bytes = cut.seen_bytes - way.n_text_bytes;
                    (n_bytes, n_tokens) = (cut.n_bytes, cut.n_tokens);
                    marks.push(Mark { seen_bytes, n_bytes, tokens: new_tokens.into() });
                }
            }
            let parent = inner.split(way.node, way.n_node_bytes);
            inner.add_leaf(parent, text[way.n_text_bytes..].into(), marks);
        }
        inner.make_room(self.max_bytes);
    }

    fn cut_distance_bytes(&self) -> usize {
        CUT_DISTANCE_BYTES
    }

    fn used_bytes(&self) -> usize {
        self.inner.lock().used_bytes
    }
}

// === impl Inner ===

impl Inner {
    fn node(&self, idx: usize) -> Option<&Node> {
        self.nodes.get(idx)?.as_ref()
    }

    fn node_mut(&mut self, idx: usize) -> Option<&mut Node> {
        self.nodes.get_mut(idx)?.as_mut()
    }

    fn root(&mut self, tokenizer: TokenizerKey) -> usize {
        if let Some(root) = self.roots.get(&tokenizer) {
            return *root;
        }
        let root = self.put(Node::new(Place::Root(tokenizer), "".into(), Vec::new()));
        self.roots.insert(tokenizer, root);
        root
    }

    /// Goes from the root as far as `text` does, and marks the nodes on the way as used.
    fn walk(&mut self, root: usize, text: &str) -> Way {
        let mut way = Way { node: root, n_node_bytes: 0, n_text_bytes: 0, known: KnownPrefix::default() };
        self.last_use += 1;
        while let Some(child) = self.child(way.node, &text[way.n_text_bytes..]) {
            self.touch(child);
            let Some(node) = self.node(child) else { break };
            let n_common_bytes = common_prefix_bytes(&node.text, &text[way.n_text_bytes..]);
            for mark in node.marks.iter().take_while(|mark| mark.seen_bytes <= n_common_bytes) {
                way.known.tokens.extend_from_slice(&mark.tokens);
                way.known.n_bytes = mark.n_bytes;
            }
            way.node = child;
            way.n_node_bytes = n_common_bytes;
            way.n_text_bytes += n_common_bytes;
            if n_common_bytes < node.text.len() {
                break;
            }
        }
        way
    }

    fn child(&self, parent: usize, text: &str) -> Option<usize> {
        let first = text.chars().next()?;
        let children = &self.node(parent)?.children;
        let place = children.binary_search_by_key(&first, |(first, _)| *first).ok()?;
        Some(children[place].1)
    }

    fn touch(&mut self, idx: usize) {
        let last_use = self.last_use;
        let Some(node) = self.node_mut(idx) else { return };
        let before = mem::replace(&mut node.used, last_use);
        if self.leaves.remove(&(before, idx)) {
            self.leaves.insert((last_use, idx));
        }
    }

    /// Makes a node end after `n_bytes` of its text and returns it; the rest becomes its only child.
    fn split(&mut self, idx: usize, n_bytes: usize) -> usize {
        let Some(node) = self.node_mut(idx) else { return idx };
        if n_bytes == node.text.len() {
            return idx;
        }
        let n_upper_marks = node.marks.partition_point(|mark| mark.seen_bytes <= n_bytes);
        let mut marks = node.marks.split_off(n_upper_marks);
        for mark in &mut marks {
            mark.seen_bytes -= n_bytes;
        }
        let lower_text: Box<str> = node.text[n_bytes..].into();
        node.text = node.text[..n_bytes].into();
        let children = mem::take(&mut node.children);
        let used = node.used;
        let is_leaf = children.is_empty();
        let lower = self.put(Node { children, used, ..Node::new(Place::Below(idx), lower_text, marks) });
        // What was counted for the upper node is counted for the lower one now.
        if let Some(lower_node) = self.node(lower) {
            self.used_bytes -= lower_node.cost_bytes() - NODE_BYTES;
        }
        for (_, child) in self.node(lower).map(|node| node.children.clone()).unwrap_or_default() {
            if let Some(child) = self.node_mut(child) {
                child.parent = Place::Below(lower);
            }
        }
        self.hang(idx, lower);
        if is_leaf {
            self.leaves.remove(&(used, idx));
            self.leaves.insert((used, lower));
        }
        idx
    }

    fn add_leaf(&mut self, parent: usize, text: Box<str>, marks: Vec<Mark>) {
        let used = self.last_use;
        let leaf = self.put(Node { used, ..Node::new(Place::Below(parent), text, marks) });
        self.leaves.insert((used, leaf));
        self.hang(parent, leaf);
        if let Some(parent_used) = self.node(parent).map(|node| node.used) {
            self.leaves.remove(&(parent_used, parent));
        }
    }

    /// Puts a node among the children of another.
    fn hang(&mut self, parent: usize, child: usize) {
        let Some(first) = self.node(child).and_then(|node| node.text.chars().next()) else { return };
        let Some(parent) = self.node_mut(parent) else { return };
        let place = parent.children.partition_point(|(other, _)| *other < first);
        parent.children.insert(place, (first, child));
    }

    fn put(&mut self, node: Node) -> usize {
        self.used_bytes += node.cost_bytes();
        if let Some(idx) = self.free.pop() {
            self.nodes[idx] = Some(node);
            return idx;
        }
        self.nodes.push(Some(node));
        self.nodes.len() - 1
    }

    fn make_room(&mut self, max_bytes: usize) {
        while max_bytes < self.used_bytes {
            let Some((_, leaf)) = self.leaves.pop_first() else { return };
            self.remove(leaf);
        }
    }

    /// Removes a node without children, and its root if that has no others.
    fn remove(&mut self, idx: usize) {
        let Some(node) = self.nodes.get_mut(idx).and_then(Option::take) else { return };
        self.used_bytes -= node.cost_bytes();
        self.free.push(idx);
        let parent = match node.parent {
            Place::Root(tokenizer) => {
                self.roots.remove(&tokenizer);
                return;
            }
            Place::Below(parent) => parent,
        };
        let Some(parent_node) = self.node_mut(parent) else { return };
        parent_node.children.retain(|(_, child)| *child != idx);
        if !parent_node.children.is_empty() {
            return;
        }
        let (used, place) = (parent_node.used, parent_node.parent);
        match place {
            Place::Root(_) => self.remove(parent),
            Place::Below(_) => {
                self.leaves.insert((used, parent));
            }
        }
    }
}

// === impl Node ===

impl Node {
    fn new(parent: Place, text: Box<str>, marks: Vec<Mark>) -> Self {
        Self { text, marks, parent, children: Vec::new(), used: 0 }
    }

    fn cost_bytes(&self) -> usize {
        let marks: usize =
            self.marks.iter().map(|mark| mem::size_of::<Mark>() + mem::size_of_val(&*mark.tokens)).sum();
        NODE_BYTES + self.text.len() + marks
    }
}

/// Bytes of the characters in which two texts begin the same.
fn common_prefix_bytes(left: &str, right: &str) -> usize {
    let n_bytes = left.bytes().zip(right.bytes()).take_while(|(left, right)| left == right).count();
    left.floor_char_boundary(n_bytes)
}
