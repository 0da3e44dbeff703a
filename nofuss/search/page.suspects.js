"use strict";
const suspects = { load() {} };
