//! When a block is used again, learned from what came back and what did not.
//!
//! The hazard of a class at an age is the chance that what was not used until that age is used within its
//! step. It is a product: a curve over the ages, an effect for each level of each feature (two of them
//! change with the age), and one for the class itself. Every factor is the ratio of the uses that were
//! seen to those that the others explain, drawn towards its prior by a few imaginary uses: with little
//! data a class behaves like its features, with much like itself.

use super::ages::{Ages, N_AGES, N_COARSE_AGES};
use super::features::{Levels, MAX_LEVELS, N_FEATURES, VARIES_WITH_AGE, combination, n_combinations};

/// Imaginary uses that hold a point of the curve, an effect and a class to their prior.
const CURVE_PRIOR_USES: f64 = 2.0;
const EFFECT_PRIOR_USES: f64 = 3.0;
const CLASS_PRIOR_USES: f64 = 30.0;

/// Passes over all factors at a fit; each fit starts from the last one, so few are enough.
const N_PASSES: usize = 2;

/// No hazard is certain.
const MAX_HAZARD: f64 = 0.9;

/// The longer a conversation has been, the likelier is a next turn.
const TURN_PRIOR: [f64; 7] = [0.6, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0];

/// Classes beside those of requests: partly full tails, ends of chains that a conversation turned away
/// from, and blocks under several conversations, by how many and by the usual time between uses.
pub(super) const TAIL_CLASS: u16 = 0;
pub(super) const LEFT_BEHIND_CLASS: u16 = 1;
const FIRST_SHARED_CLASS: usize = 2;
const N_SHARED_PACES: usize = 14;
const N_FORK_LEVELS: usize = 3;
const N_OWN_CLASSES: usize = FIRST_SHARED_CLASS + N_FORK_LEVELS * N_SHARED_PACES;

/// What a class beside those of requests is watched in imagination, at the hazard that is its prior.
const OWN_PRIOR_WATCHED: f64 = 0.5;

/// How much of its pace a shared block is expected to keep: few uses by others are not yet a rate.
const SHARED_PRIOR: [f64; N_FORK_LEVELS] = [0.03, 0.1, 1.0];

const NO_CLASS: u16 = u16::MAX;

/// Position of the effect that holds at all ages, behind those of the coarse ages.
const ALWAYS: usize = N_COARSE_AGES;

type Effects = [[[f64; N_COARSE_AGES + 1]; MAX_LEVELS]; N_FEATURES];

/// The statistics and the index that follows from them.
#[derive(Debug)]
pub(super) struct Model {
    ages: Ages,
    classes: Vec<Class>,
    class_of: Vec<u16>,
    curve: [f64; N_AGES],
    curve_prior: [f64; N_AGES],
    effects: Effects,
    effects_prior: Effects,
    n_fits: u32,
}

#[derive(Debug)]
struct Class {
    levels: Levels,
    /// Uses within a step, and what got as far as that step and through it or was used in it.
    n_used: [f32; N_AGES],
    n_watched: [f32; N_AGES],
    effect: f64,
    index: [f32; N_AGES],
    index_of_fit: u32,
}

impl Class {
    fn new(levels: Levels) -> Self {
        Self {
            levels,
            n_used: [0.0; N_AGES],
            n_watched: [0.0; N_AGES],
            effect: 1.0,
            index: [0.0; N_AGES],
            index_of_fit: 0,
        }
    }
}

impl Model {
    pub(super) fn new() -> Self {
        let ages = Ages::new();
        let mut curve = [1e-4; N_AGES];
        for (age, hazard) in curve.iter_mut().enumerate().take(N_AGES - 1) {
            // Half of the conversations go on, most within minutes; hardly any within seconds.
            let middle_s = ages.middle_s(age);
            let haste = if middle_s < 15.0 { 0.3 } else { 1.0 };
            *hazard = (0.25 * ages.length_s(age) / (middle_s + 150.0)).min(0.25) * haste;
        }
        let mut effects = [[[1.0; N_COARSE_AGES + 1]; MAX_LEVELS]; N_FEATURES];
        for (level, prior) in TURN_PRIOR.into_iter().enumerate() {
            effects[0][level][ALWAYS] = prior;
        }
        Self {
            ages,
            classes: (0..N_OWN_CLASSES).map(|_| Class::new([0; N_FEATURES])).collect(),
            class_of: vec![NO_CLASS; n_combinations()],
            curve,
            curve_prior: curve,
            effects,
            effects_prior: effects,
            n_fits: 1,
        }
    }

    pub(super) fn ages(&self) -> &Ages {
        &self.ages
    }

    /// The class of requests with these levels.
    pub(super) fn class(&mut self, levels: Levels) -> u16 {
        let place = &mut self.class_of[combination(levels)];
        if *place == NO_CLASS {
            *place = self.classes.len() as u16;
            self.classes.push(Class::new(levels));
        }
        *place
    }

    /// The class of a block under several conversations, by how many and by the usual time
    /// between its uses.
    pub(super) fn shared_class(n_forks: u8, pace_s: f32) -> u16 {
        let pace = (pace_s.clamp(1.0, 1e6) as u32).ilog2() as usize;
        let fork_level = (n_forks.max(1).ilog2() as usize).min(N_FORK_LEVELS - 1);
        (FIRST_SHARED_CLASS + fork_level * N_SHARED_PACES + pace.min(N_SHARED_PACES - 1)) as u16
    }

    /// Notes that something of a class got through a step without being used.
    pub(super) fn note_unused(&mut self, class: u16, age: usize, weight: f32) {
        self.classes[usize::from(class)].n_watched[age] += weight;
    }

    /// Notes that something of a class was used within a step.
    pub(super) fn note_used(&mut self, class: u16, age: usize, weight: f32) {
        let class = &mut self.classes[usize::from(class)];
        class.n_watched[age] += weight;
        class.n_used[age] += weight;
    }

    /// Halves the weight of everything that was seen.
    pub(super) fn fade(&mut self) {
        for class in &mut self.classes {
            for count in class.n_used.iter_mut().chain(&mut class.n_watched) {
                *count *= 0.5;
            }
        }
    }

    /// Expected uses per second of holding something of a class at an age, for the best time to hold it.
    ///
    /// That is the Gittins index: to keep what has the highest index is to get the most uses out of the
    /// room, whether a use is soon, or likely, or both.
    pub(super) fn index(&mut self, class: u16, age_s: f64) -> f64 {
        let number = usize::from(class);
        if self.classes[number].index_of_fit != self.n_fits {
            self.classes[number].index = self.index_of_all_ages(number);
            self.classes[number].index_of_fit = self.n_fits;
        }
        let index = &self.classes[number].index;
        let age = self.ages.step(age_s);
        let here = f64::from(index[age]);
        match index.get(age + 1) {
            Some(&next) if age + 2 < N_AGES => here + (f64::from(next) - here) * self.ages.part(age, age_s),
            _ => here,
        }
    }

    fn index_of_all_ages(&self, number: usize) -> [f32; N_AGES] {
        let mut hazards = [0.0; N_AGES];
        for (age, hazard) in hazards.iter_mut().enumerate() {
            *hazard = self.hazard(number, age);
        }
        let mut index = [0.0_f32; N_AGES];
        for (from, best) in index.iter_mut().enumerate() {
            let (mut unused, mut used, mut held_s) = (1.0, 0.0, 0.0);
            for (age, hazard) in hazards.iter().enumerate().take(N_AGES - 1).skip(from) {
                let used_here = unused * hazard;
                used += used_here;
                held_s += self.ages.length_s(age) * (unused - 0.5 * used_here);
                unused -= used_here;
                *best = best.max((used / held_s) as f32);
            }
        }
        index
    }

    fn hazard(&self, number: usize, age: usize) -> f64 {
        let class = &self.classes[number];
        if number < N_OWN_CLASSES {
            let prior_uses = OWN_PRIOR_WATCHED * self.own_prior(number, age);
            let (n_used, n_watched) = (f64::from(class.n_used[age]), f64::from(class.n_watched[age]));
            return ((n_used + prior_uses) / (n_watched + OWN_PRIOR_WATCHED)).min(MAX_HAZARD);
        }
        let coarse = self.ages.coarse(age);
        let of_features: f64 = (self.effects.iter().zip(class.levels))
            .map(|(effects, level)| {
                let effect = &effects[usize::from(level)];
                effect[ALWAYS] * effect[coarse]
            })
            .product();
        (self.curve[age] * class.effect * of_features).min(MAX_HAZARD)
    }

    /// Tails and ends are not expected back; what is shared is, at its pace and without memory.
    fn own_prior(&self, number: usize, age: usize) -> f64 {
        match number.checked_sub(FIRST_SHARED_CLASS) {
            None => 0.0,
            Some(shared) => {
                let pace_s = f64::from(1_u32 << (shared % N_SHARED_PACES));
                let length_s = self.ages.length_s(age).min(1e9);
                SHARED_PRIOR[shared / N_SHARED_PACES] * length_s / (length_s + pace_s)
            }
        }
    }

    /// Fits all factors to what was seen.
    pub(super) fn fit(&mut self) {
        self.n_fits = self.n_fits.wrapping_add(1);
        for _ in 0..N_PASSES {
            self.fit_curve();
            for (feature, varies) in VARIES_WITH_AGE.into_iter().enumerate() {
                self.fit_effects(feature, false);
                if varies {
                    self.fit_effects(feature, true);
                }
            }
            self.fit_classes();
        }
    }

    fn fit_curve(&mut self) {
        let mut seen = [0.0; N_AGES];
        let mut explained = [0.0; N_AGES];
        self.for_each_cell(|_, age, n_used, expected| {
            seen[age] += n_used;
            explained[age] += expected;
        });
        for (age, sum) in explained.iter_mut().enumerate() {
            // In multiples of the prior, so that neighbors can be added up.
            *sum *= self.curve_prior[age] / self.curve[age];
        }
        // Where nothing has been seen yet, the curve goes on as it was at the ages before: what is older
        // than all experience must not look better than what experience speaks against.
        let mut ratio = 1.0;
        for age in 0..N_AGES {
            // The curve is smooth: neighbors count as much as the step itself.
            let around = age.saturating_sub(1)..(age + 2).min(N_AGES - 1).max(age + 1);
            let n_seen: f64 = seen[around.clone()].iter().sum();
            let n_explained: f64 = explained[around].iter().sum();
            ratio = (n_seen + CURVE_PRIOR_USES * ratio) / (n_explained + CURVE_PRIOR_USES);
            self.curve[age] = self.curve_prior[age] * ratio;
        }
    }

    fn fit_effects(&mut self, feature: usize, by_age: bool) {
        let mut seen = [[0.0; N_COARSE_AGES + 1]; MAX_LEVELS];
        let mut explained = [[0.0; N_COARSE_AGES + 1]; MAX_LEVELS];
        self.for_each_cell(|class, age, n_used, expected| {
            let level = usize::from(class.levels[feature]);
            let at = if by_age { self.ages.coarse(age) } else { ALWAYS };
            seen[level][at] += n_used;
            explained[level][at] += expected;
        });
        let range = if by_age { 0..ALWAYS } else { ALWAYS..ALWAYS + 1 };
        for level in 0..MAX_LEVELS {
            for at in range.clone() {
                let prior = self.effects_prior[feature][level][at];
                let effect = &mut self.effects[feature][level][at];
                let by_prior = explained[level][at] * prior / *effect;
                *effect = prior * (seen[level][at] + EFFECT_PRIOR_USES) / (by_prior + EFFECT_PRIOR_USES);
            }
        }
    }

    fn fit_classes(&mut self) {
        for number in N_OWN_CLASSES..self.classes.len() {
            let class = &self.classes[number];
            let (mut seen, mut explained) = (0.0, 0.0);
            for age in 0..N_AGES {
                if class.n_watched[age] > 0.0 {
                    seen += f64::from(class.n_used[age]);
                    explained += f64::from(class.n_watched[age]) * self.hazard(number, age) / class.effect;
                }
            }
            self.classes[number].effect = (seen + CLASS_PRIOR_USES) / (explained + CLASS_PRIOR_USES);
        }
    }

    /// Calls with class, age, uses that were seen and uses that the factors of now explain.
    fn for_each_cell(&self, mut call: impl FnMut(&Class, usize, f64, f64)) {
        for (number, class) in self.classes.iter().enumerate().skip(N_OWN_CLASSES) {
            for age in 0..N_AGES {
                let n_watched = f64::from(class.n_watched[age]);
                if n_watched > 0.0 {
                    call(class, age, f64::from(class.n_used[age]), n_watched * self.hazard(number, age));
                }
            }
        }
    }
}
